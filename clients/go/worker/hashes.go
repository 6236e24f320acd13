package worker

// #cgo LDFLAGS: -lxxhash
// #include <xxhash.h>
import "C"

import "unsafe"

// XXH3 in its canonical form, big-endian, by the library in C: Debian has none in Go. A client that
// may fetch modules can take github.com/zeebo/xxh3.

func hash128(data []byte) []byte {
	var canonical C.XXH128_canonical_t
	C.XXH128_canonicalFromHash(&canonical, C.XXH3_128bits(start(data), C.size_t(len(data))))
	return C.GoBytes(unsafe.Pointer(&canonical), C.int(unsafe.Sizeof(canonical)))
}

func hash64(data []byte) []byte {
	var canonical C.XXH64_canonical_t
	C.XXH64_canonicalFromHash(&canonical, C.XXH3_64bits(start(data), C.size_t(len(data))))
	return C.GoBytes(unsafe.Pointer(&canonical), C.int(unsafe.Sizeof(canonical)))
}

func start(data []byte) unsafe.Pointer {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Pointer(&data[0])
}
