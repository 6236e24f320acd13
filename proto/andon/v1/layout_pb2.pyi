from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FLOAT32: _ClassVar[Encoding]
    ENCODING_FLOAT16: _ClassVar[Encoding]
    ENCODING_BFLOAT16: _ClassVar[Encoding]
    ENCODING_FLOAT64: _ClassVar[Encoding]
    ENCODING_INT32: _ClassVar[Encoding]
    ENCODING_INT64: _ClassVar[Encoding]
    ENCODING_UINT8: _ClassVar[Encoding]
    ENCODING_INT8_BLOCK: _ClassVar[Encoding]
    ENCODING_INT4_BLOCK: _ClassVar[Encoding]
    ENCODING_INT2_BLOCK: _ClassVar[Encoding]
    ENCODING_TOPK: _ClassVar[Encoding]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT64: _ClassVar[Dtype]

class BlockKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_KIND_UNSPECIFIED: _ClassVar[BlockKind]
    BLOCK_KIND_TRANSFORMER_BLOCK: _ClassVar[BlockKind]
    BLOCK_KIND_LM_HEAD: _ClassVar[BlockKind]
    BLOCK_KIND_FINAL_NORM: _ClassVar[BlockKind]
    BLOCK_KIND_EMBEDDING: _ClassVar[BlockKind]
    BLOCK_KIND_OTHER: _ClassVar[BlockKind]
ENCODING_UNSPECIFIED: Encoding
ENCODING_FLOAT32: Encoding
ENCODING_FLOAT16: Encoding
ENCODING_BFLOAT16: Encoding
ENCODING_FLOAT64: Encoding
ENCODING_INT32: Encoding
ENCODING_INT64: Encoding
ENCODING_UINT8: Encoding
ENCODING_INT8_BLOCK: Encoding
ENCODING_INT4_BLOCK: Encoding
ENCODING_INT2_BLOCK: Encoding
ENCODING_TOPK: Encoding
DTYPE_UNSPECIFIED: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_FLOAT16: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT64: Dtype
BLOCK_KIND_UNSPECIFIED: BlockKind
BLOCK_KIND_TRANSFORMER_BLOCK: BlockKind
BLOCK_KIND_LM_HEAD: BlockKind
BLOCK_KIND_FINAL_NORM: BlockKind
BLOCK_KIND_EMBEDDING: BlockKind
BLOCK_KIND_OTHER: BlockKind

class Component(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: Dtype
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("kind", "name", "components")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    kind: BlockKind
    name: str
    components: _containers.RepeatedCompositeFieldContainer[Component]
    def __init__(self, kind: _Optional[_Union[BlockKind, str]] = ..., name: _Optional[str] = ..., components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("blocks", "digest")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    digest: bytes
    def __init__(self, blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., digest: _Optional[bytes] = ...) -> None: ...
