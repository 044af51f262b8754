"""The classes that vLLM loads for the backends of `kvjax_models.adapters.tpu_inference`."""

from tpu_inference.layers.vllm.backends.flash_attn import PallasAttentionBackend, PallasAttentionBackendImpl


class Int4Implementation(PallasAttentionBackendImpl):
    """Layers whose pages hold 4-bit keys and values."""

    attention_backend = "kvjax_int4"


class Int8Implementation(PallasAttentionBackendImpl):
    """Layers whose pages hold 8-bit keys and values."""

    attention_backend = "kvjax_int8"


class Int4Backend(PallasAttentionBackend):
    """Selects `Int4Implementation`."""

    @staticmethod
    def get_name() -> str:
        """Returns the name in vLLM's registry."""
        return "KVJAX_INT4"

    @staticmethod
    def get_impl_cls() -> type[PallasAttentionBackendImpl]:
        """Returns the implementation."""
        return Int4Implementation


class Int8Backend(PallasAttentionBackend):
    """Selects `Int8Implementation`."""

    @staticmethod
    def get_name() -> str:
        """Returns the name in vLLM's registry."""
        return "KVJAX_INT8"

    @staticmethod
    def get_impl_cls() -> type[PallasAttentionBackendImpl]:
        """Returns the implementation."""
        return Int8Implementation
