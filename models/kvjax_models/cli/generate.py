"""`kvjax generate`: continues a text, as it is written.

    kvjax generate --model DIR --prompt_file FILE --policy subgen --budget 25%

A long run saves itself, and goes on where it was when it is started again:

    kvjax generate --model DIR --prompt_file FILE --save_dir RUN --save_every 256
    kvjax generate --model DIR --prompt_file FILE --save_dir RUN --save_every 256 --resume

A long text can be read and compressed once, and asked about many times:

    kvjax generate --model DIR --prompt_file TEXT --save_prefix READ --max_new_tokens 512
    kvjax generate --model DIR --prefix READ --prompt_file QUESTION1 --prompt_file QUESTION2 --max_new_tokens 64

Many prompts go through a few rows (`command.many`):

    kvjax generate --model DIR --prompts_file IN.jsonl --output OUT.jsonl --batch_size 8
"""

import dataclasses
import hashlib
import time

import kvjax
from kvjax_models import fingerprint
from kvjax_models.cli import many
from kvjax_models.cli.options import (
    GenerationOptions,
    describe_cache,
    read_text,
    repeatable,
    write_output,
    write_status,
)
from kvjax_models.formats.tokenizer import Streamer
from kvjax_models.generation.generator import extend_rows
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.language_model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Generate(GenerationOptions):
    """Continues a text through a compressed cache, as it is written."""

    prompt: str | None = None  # Text to continue.
    prompt_file: list[str] = repeatable("FILE")  # The same in a file, - for standard input; with --prefix repeatable.
    chat: bool = False  # Send the text as a user's message, through the checkpoint's chat template.
    streaming: bool = False  # Read the text through the cache, in memory that does not grow.
    save_dir: str | None = None  # Where the run saves itself.
    save_every: int = 256  # Tokens between two saves, in whole blocks.
    resume: bool = False  # Go on where the newest save in --save_dir, or --output, stands.
    save_prefix: str | None = None  # Read the text, save the compressed cache here; --max_new_tokens is its room.
    prefix: str | None = None  # Continue what --save_prefix saved here.
    prompts_file: str | None = None  # Many prompts instead, a JSON text or object per line; with --output.
    output: str | None = None  # Where what was written to each of them goes, a JSON object per line.
    batch_size: str = "8"  # Rows that they go through (8), or bytes for their caches (2GiB).
    stop: list[str] = repeatable("TEXT")  # Ends what is written to one of them, and is no part of it; repeatable.

    def run(self) -> None:
        _check(self)
        if self.prompts_file is not None:
            assert self.output is not None
            llm = self.load()
            many.write_file(self, llm, self.prompts_file, self.output, self.batch_size, self.stop, self.resume)
            return
        texts = [*([self.prompt] if self.prompt is not None else []), *map(read_text, self.prompt_file)]
        llm = self.load()
        if self.prefix is not None:
            _continue_prefix(self, llm, SavedStates(self.prefix), texts)
        else:
            _continue_text(self, llm, texts[0])


def _check(given: Generate) -> None:
    """Raises a ValueError for options that do not go together."""
    texts = (given.prompt is not None) + len(given.prompt_file)
    if given.prompts_file is not None or given.output is not None:
        _check_many(given, texts)
        return
    if given.stop:
        raise ValueError("--stop goes with --prompts_file only")
    if texts == 0:
        raise ValueError("give --prompt TEXT or --prompt_file FILE (- for standard input), or --prompts_file FILE")
    if texts > 1 and given.prefix is None:
        raise ValueError("several texts go with --prefix only")
    if given.resume and given.save_dir is None:
        raise ValueError("--resume needs --save_dir")
    if given.resume and given.save_prefix is not None:
        raise ValueError("--resume goes with --save_dir alone")
    if given.prefix is not None and (given.save_dir is not None or given.save_prefix is not None):
        raise ValueError("--prefix goes with neither --save_dir nor --save_prefix")
    if given.max_new_tokens < 1 or given.save_every < 1:
        raise ValueError("--max_new_tokens and --save_every must be at least 1")
    given.choice, given.kv_formats, given.sampling  # noqa: B018  refused before a model is loaded


def _check_many(given: Generate, texts: int) -> None:
    if given.prompts_file is None or given.output is None:
        raise ValueError("--prompts_file and --output go together")
    others = ("save_dir", "save_prefix", "prefix", "streaming", "chat")
    beside = [name for name in others if getattr(given, name)] + ["prompt"] * bool(texts)
    if beside:
        raise ValueError(f"--prompts_file does not go with --{beside[0]}")
    if given.max_new_tokens < 1:
        raise ValueError("--max_new_tokens must be at least 1")
    given.choice, given.kv_formats, given.sampling  # noqa: B018  refused before a model is loaded


def _continue_text(given: Generate, llm: LanguageModel, text: str) -> None:
    """Reads the text, and writes on; or reads and saves it."""
    saved = None if given.save_dir is None else SavedStates(given.save_dir)
    prefix = None if given.save_prefix is None else SavedStates(given.save_prefix)
    for one in (saved, prefix):
        if one is not None and not given.resume:
            one.lock(require_empty=True)
    prompt = _encoded(given, llm, text)
    writer = llm.generator(
        given.choice,
        max_prompt_tokens=len(prompt),
        max_new_tokens=given.max_new_tokens,
        sampling=given.sampling,
        streaming=given.streaming,
        allow_beyond_context=given.allow_beyond_context,
        kv_dtype=given.kv_formats,
    )
    run = {
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
        "sampling": dataclasses.asdict(writer.sampling),
        "seed": given.seed,
        "tokenizer": fingerprint.tokenizer_fingerprint(llm.tokenizer),
    }
    begin = time.perf_counter()
    written: list[int] = []
    if saved is not None and given.resume:
        _, state, notes = saved.restore(writer, run)
        saved.lock()
        written = notes["tokens"]
    else:
        state = writer.prefill(writer.init_state(given.seed), [prompt])
    state.logits.block_until_ready()
    prefilled = time.perf_counter()
    if prefix is not None:
        prefix.save(0, writer, state, _of_prefix(llm), {"tokens": len(prompt)})
        write_status(f"[{given.choice}: {len(prompt)} tokens read and saved; {describe_cache(writer, state)}]")
        return
    streamer = Streamer(llm.tokenizer, context=prompt)
    write_output("".join(map(streamer.push, written)))
    begun = safe = len(written)
    # A state that is saved must be settled: then whole blocks come.
    for newest, tokens in writer.decode(state, given.max_new_tokens - begun, None if saved else 1):
        state = newest
        for token in tokens[0].tolist():
            written.append(token)
            write_output(streamer.push(token))
        ends = len(written) == given.max_new_tokens or bool(state.done.all())
        if saved is not None and (ends or len(written) - safe >= given.save_every):
            saved.save(len(written), writer, state, run, {"tokens": written})
            safe = len(written)
    write_output(streamer.flush() + "\n")
    seconds = time.perf_counter() - prefilled
    kvjax.raise_faults(state)
    write_status(
        f"[{given.choice}: {len(prompt)} tokens {'restored' if begun else 'read'} in {prefilled - begin:.2f} s, "
        f"{len(written) - begun} written at {(len(written) - begun) / seconds:.1f} tokens/s (compilation included); "
        f"{describe_cache(writer, state)}]"
    )


def _continue_prefix(given: Generate, llm: LanguageModel, saved: SavedStates, texts: list[str]) -> None:
    """Reads every text behind one saved prefix, all side by side, and writes on."""
    sizes = saved.generator_sizes()
    alone = llm.generator(
        given.choice,
        **sizes,
        sampling=given.sampling,
        allow_beyond_context=given.allow_beyond_context,
        kv_dtype=given.kv_formats,
    )
    _, prefix, notes = saved.restore(alone, _of_prefix(llm))
    many = alone.with_batch(len(texts))
    forks = many.reseed(kvjax.repeat_rows(prefix, len(texts)), given.seed)
    state = many.prefill(forks, [_encoded(given, llm, text, True) for text in texts])
    rows: list[list[int]] = [[] for _ in texts]
    for newest, tokens in many.decode(state, given.max_new_tokens):
        state = newest
        extend_rows(rows, tokens)
    kvjax.raise_faults(state)
    names = [*(["--prompt"] if given.prompt is not None else []), *given.prompt_file]
    for name, row in zip(names, rows, strict=True):
        write_output(f"== {name}\n{llm.tokenizer.decode(row)}\n")
    write_status(
        f"[{given.choice}: {len(texts)} continuations of {notes['tokens']} tokens read before; {describe_cache(many, state)}]"
    )


def _of_prefix(llm: LanguageModel) -> dict[str, str]:
    """What else than the model a prefix belongs to."""
    return {"tokenizer": fingerprint.tokenizer_fingerprint(llm.tokenizer)}


def _encoded(given: Generate, llm: LanguageModel, text: str, follows: bool = False) -> list[int]:
    """The tokens of a text, which may follow others."""
    if given.chat:
        return llm.encode([{"role": "user", "content": text}])
    return llm.tokenizer.encode(text, add_bos=not follows)
