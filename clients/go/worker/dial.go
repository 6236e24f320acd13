package worker

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/ioutil"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
)

// Dial opens a separate connection, so that gradients never delay control messages.
//
// The folder holds ca.crt, which verifies the peer, and optionally tls.crt and tls.key, which
// identify this worker.
func Dial(address, folder string) (*grpc.ClientConn, error) {
	security := grpc.WithInsecure()
	if folder != "" {
		config := &tls.Config{MinVersion: tls.VersionTLS12}
		authority, err := ioutil.ReadFile(filepath.Join(folder, "ca.crt"))
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(authority) {
			return nil, errors.New("ANDON_TLS_DIR: ca.crt holds no certificate")
		}
		certificate := filepath.Join(folder, "tls.crt")
		if _, err := os.Stat(certificate); err == nil {
			pair, err := tls.LoadX509KeyPair(certificate, filepath.Join(folder, "tls.key"))
			if err != nil {
				return nil, err
			}
			config.Certificates = []tls.Certificate{pair}
		}
		security = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	alive := keepalive.ClientParameters{Time: 60 * time.Second, Timeout: 20 * time.Second}
	return grpc.Dial(address, security, grpc.WithNoProxy(), grpc.WithKeepaliveParams(alive))
}

// Token returns the run's token, from ANDON_TOKEN_FILE or ANDON_TOKEN. A line may require one.
func Token() ([]byte, error) {
	if file := os.Getenv("ANDON_TOKEN_FILE"); file != "" {
		text, err := ioutil.ReadFile(file)
		return bytes.TrimSpace(text), err
	}
	return []byte(os.Getenv("ANDON_TOKEN")), nil
}
