from tests.models.families import hf_checkpoint

__all__ = ["hf_checkpoint"]
