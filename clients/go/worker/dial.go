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

// Dial makes a connection of its own, so that bulk never delays control.
//
// A folder holds ca.crt, who is trusted, and perhaps tls.crt and tls.key, what this worker shows.
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

// Token is the secret that a line may ask for: of ANDON_TOKEN_FILE, or ANDON_TOKEN.
func Token() ([]byte, error) {
	if file := os.Getenv("ANDON_TOKEN_FILE"); file != "" {
		text, err := ioutil.ReadFile(file)
		return bytes.TrimSpace(text), err
	}
	return []byte(os.Getenv("ANDON_TOKEN")), nil
}
