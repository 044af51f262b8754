"""`kvjax generate`: continues a text and prints it during generation.

    kvjax generate --model DIR --prompt_file FILE --policy auto --budget 25%

A long run can save its state and be resumed:

    kvjax generate --model DIR --prompt_file FILE --save_dir RUN --save_every 256
    kvjax generate --model DIR --prompt_file FILE --save_dir RUN --save_every 256 --resume

A long text can be compressed once and continued with many questions:

    kvjax generate --model DIR --prompt_file TEXT --save_prefix READ --max_new_tokens 512
    kvjax generate --model DIR --prefix READ --prompt_file QUESTION1 --prompt_file QUESTION2 --max_new_tokens 64

Many prompts are processed by continuous batching (`cli.many`):

    kvjax generate --model DIR --prompts_file IN.jsonl --output OUT.jsonl --batch_size 8
"""

import dataclasses
import hashlib
from typing import Any

import kvjax
from kvjax_models.cli import many, progress
from kvjax_models.cli.options import (
    GenerationOptions,
    describe_cache,
    read_text,
    repeatable,
    write_output,
)
from kvjax_models.fingerprint import tokenizer_fingerprint
from kvjax_models.formats.tokenizer import CONTEXT_TOKENS, Streamer
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.prefix import Prefix
from kvjax_models.generation.saved_states import SavedStates
from kvjax_models.generation.state import GenerationState
from kvjax_models.language_model import LanguageModel
from kvjax_models.stopwatch import Stopwatch


@dataclasses.dataclass(frozen=True)
class Generate(GenerationOptions):
    """Continues a text through a compressed cache and prints it during generation."""

    prompt: str | None = None  # Text to continue.
    prompt_file: list[str] = repeatable("FILE")  # File with the text, - for standard input; repeatable with --prefix.
    chat: bool = False  # Send the text as a user's message, in the model's chat template.
    streaming: bool = False  # Append the text to the cache in blocks; memory is independent of its length.
    save_dir: str | None = None  # Directory in which the run saves its states.
    save_every: int = 256  # Tokens between two saves, rounded up to entire blocks.
    resume: bool = False  # Continue from the newest state in --save_dir, or from --output.
    save_prefix: str | None = None  # Save the compressed text to this directory, with capacity for --max_new_tokens.
    prefix: str | None = None  # Continue the compressed text in this directory of --save_prefix.
    prompts_file: str | None = None  # Many prompts instead, one JSON text or object per line; with --output.
    output: str | None = None  # File for the completions of --prompts_file, one JSON object per line.
    batch_size: str = "8"  # Batch rows for --prompts_file (8), or bytes for their caches (2GiB).
    stop: list[str] = repeatable("TEXT")  # String that finishes a completion of --prompts_file; repeatable.

    def run(self) -> None:
        """Runs the command."""
        _check_options(self)
        if self.prompts_file is not None:
            assert self.output is not None
            llm = self.load()
            many.complete_file(self, llm, self.prompts_file, self.output, self.batch_size, self.stop, self.resume)
            return
        texts = [*([self.prompt] if self.prompt is not None else []), *map(read_text, self.prompt_file)]
        llm = self.load()
        if self.prefix is not None:
            _continue_prefix(self, llm, SavedStates(self.prefix), texts)
        else:
            _continue_text(self, llm, texts[0])


def _check_options(options: Generate) -> None:
    """Checks that options can be combined.

    Raises:
        ValueError: if they cannot.
    """
    num_texts = (options.prompt is not None) + len(options.prompt_file)
    if options.prompts_file is not None or options.output is not None:
        if options.prompts_file is None or options.output is None:
            raise ValueError("--prompts_file and --output require each other")
        others = ("save_dir", "save_prefix", "prefix", "streaming", "chat")
        if conflicts := [name for name in others if getattr(options, name)] + ["prompt"] * bool(num_texts):
            raise ValueError(f"--prompts_file cannot be combined with --{conflicts[0]}")
        options.check()
        return
    if options.stop:
        raise ValueError("--stop requires --prompts_file")
    if num_texts == 0:
        raise ValueError(
            "a prompt is required: --prompt TEXT, --prompt_file FILE (- for standard input) or --prompts_file"
        )
    if num_texts > 1 and options.prefix is None:
        raise ValueError("several texts require --prefix")
    if options.resume and options.save_dir is None:
        raise ValueError("--resume requires --save_dir")
    if options.resume and options.save_prefix is not None:
        raise ValueError("--resume cannot be combined with --save_prefix")
    if options.prefix is not None and (options.save_dir is not None or options.save_prefix is not None):
        raise ValueError("--prefix cannot be combined with --save_dir or --save_prefix")
    if options.template_options is not None and not options.chat:
        raise ValueError("--template_options requires --chat true, or messages in --prompts_file")
    if options.save_every < 1:
        raise ValueError(f"--save_every={options.save_every} must be at least 1")
    options.check()


def _continue_text(options: Generate, llm: LanguageModel, text: str) -> None:
    """Continues a text, or saves its compressed cache."""
    saves = None if options.save_dir is None else SavedStates(options.save_dir)
    prefix_saves = None if options.save_prefix is None else SavedStates(options.save_prefix)
    for directory in (saves, prefix_saves):
        if directory is not None and not options.resume:
            directory.lock(require_empty=True)
    if options.chat:
        # Questions about a saved prefix are further turns of the user.
        is_question = options.save_prefix is None
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": text}], is_question, options.chat_options)
    else:
        prompt = llm.encode(text)
    generator = llm.generator(
        options.choice,
        max_prompt_tokens=len(prompt),
        max_new_tokens=options.max_new_tokens,
        sampling=options.sampling,
        streaming=options.streaming,
        allow_beyond_context=options.allow_beyond_context,
        kv_dtype=options.kv_formats,
    )
    run = {
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
        "sampling": dataclasses.asdict(generator.sampling),
        "seed": options.seed,
        "tokenizer": tokenizer_fingerprint(llm.tokenizer),
    }
    stopwatch = Stopwatch()
    tokens: list[int] = []
    if saves is not None and options.resume:
        _, state, notes = saves.restore(generator, run)
        saves.lock()
        tokens = notes["tokens"]
    else:
        line = progress.ProgressLine(options.quiet)
        state = progress.prefill(generator, generator.init_state(options.seed), [prompt], line)
    state.logits.block_until_ready()
    seconds = stopwatch.seconds
    if prefix_saves is not None:
        context = tuple(prompt[-CONTEXT_TOKENS:])
        prefix = Prefix(llm.tokenizer, generator, state, len(prompt), context, tuple(prompt), options.seed)
        prefix.save(prefix_saves.directory)
        options.write_summary(f"{len(prompt)} tokens read and saved", describe_cache(generator, state))
        return
    speed, state = _print_continuation(options, llm, generator, state, prompt, tokens, saves, run)
    action = "restored" if saves is not None and options.resume else "read"
    options.write_summary(
        f"{len(prompt)} tokens {action} in {seconds:.2f} s, {speed}, {stopwatch.compile_seconds:.1f} s of compilation",
        describe_cache(generator, state),
    )


def _print_continuation(
    options: Generate,
    llm: LanguageModel,
    generator: Generator,
    state: GenerationState,
    prompt: list[int],
    tokens: list[int],
    saves: SavedStates | None,
    run: dict[str, Any],
) -> tuple[str, GenerationState]:
    """Prints and saves a continuation from the given new tokens on; returns a description of its speed."""
    stopwatch = Stopwatch()
    streamer = Streamer(llm.tokenizer, context=prompt)
    write_output("".join(map(streamer.push, tokens)))
    num_restored = num_saved = len(tokens)
    line = progress.ProgressLine(options.quiet)
    line.show("compiling a decode step ...")
    # States are saved when they are settled, at the end of a block.
    interval = None if saves else 1
    max_tokens = options.max_new_tokens - num_restored
    for new_state, block in generator.decode(state, max_tokens, interval, compact_last=saves is not None):
        state = new_state
        if len(tokens) == num_restored:
            line.show("")
        for token in block[0].tolist():
            tokens.append(token)
            write_output(streamer.push(token))
        is_last = len(tokens) == options.max_new_tokens or bool(state.done.all())
        if saves is not None and (is_last or len(tokens) - num_saved >= options.save_every):
            saves.save(len(tokens), generator, state, run, {"tokens": tokens})
            num_saved = len(tokens)
    write_output(streamer.flush() + "\n")
    seconds = max(stopwatch.seconds, 1e-6)
    kvjax.raise_faults(state)
    num_new = len(tokens) - num_restored
    return f"{num_new} generated at {num_new / seconds:.1f} tokens/s", state


def _continue_prefix(options: Generate, llm: LanguageModel, saves: SavedStates, texts: list[str]) -> None:
    """Appends every text to a copy of a saved prefix and continues all of them as one batch."""
    prefix = llm.restore_prefix(
        saves.directory,
        options.choice,
        sampling=options.sampling,
        allow_beyond_context=options.allow_beyond_context,
        kv_dtype=options.kv_formats,
    )
    if options.chat:
        messages = [[{"role": "user", "content": text}] for text in texts]
        texts = [llm.tokenizer.render_turn(turn, options.chat_options) for turn in messages]
    prompts = [llm.tokenizer.encode_continuation(text, prefix.context) for text in texts]
    rows, state = prefix.continue_tokens(prompts, options.max_new_tokens, seed=options.seed)
    names = [*(["--prompt"] if options.prompt is not None else []), *options.prompt_file]
    for name, answer in zip(names, prefix.decode(rows, prompts), strict=True):
        write_output(f"== {name}\n{answer}\n")
    options.write_summary(
        f"{len(texts)} continuations of a prefix of {prefix.num_tokens} tokens",
        describe_cache(prefix.generator.with_batch(len(texts)), state),
    )
