"""Checkpoint formats: reads and writes configurations, weights and tokenizers.

Each format has one module, such as `huggingface`, with `load_config` and `load_model`. It reads its files into a
`checkpoint.Checkpoint`: a `LlamaConfig` and tensors by their Hugging Face names. `checkpoint.build_model` turns that
into a model, and the format's tokenizer becomes a `tokenizer.Tokenizer`.
"""
