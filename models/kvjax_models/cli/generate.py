"""`kvjax generate`: continues a text and prints it during generation.

    kvjax generate --model DIR --prompt_file FILE --policy auto --budget 25%
    kvjax generate --model DIR < FILE

A long text can be compressed once and asked many questions, in the model's chat template if it has one:

    kvjax generate --model DIR --prompt_file TEXT --save_document READ --policy auto --max_new_tokens 512
    kvjax generate --model DIR --document READ --prompt "Who?" --prompt_file QUESTION --max_new_tokens 64

Many prompts are processed by continuous batching (`cli.many`):

    kvjax generate --model DIR --prompts_file IN.jsonl --output OUT.jsonl --batch_size 8
"""

import dataclasses
import sys

from kvjax.budget import format_bytes
from kvjax_models.cache import read_together
from kvjax_models.cli import many, progress
from kvjax_models.cli.options import GenerationOptions, describe_prefix, describe_sizes, read_text, repeatable
from kvjax_models.cli.output import write_output
from kvjax_models.document import Document
from kvjax_models.language_model import LanguageModel
from kvjax_models.prompts import warn_of_file_name
from kvjax_models.saves import Save


@dataclasses.dataclass(frozen=True)
class Generate(GenerationOptions):
    """Continues a text through a compressed cache and prints it during generation."""

    prompt: str | None = None  # Text to continue; by default standard input, unless it is a terminal.
    prompt_file: list[str] = repeatable("FILE")  # File with the text, - for standard input; repeatable with --document.
    chat: bool = False  # Send the text as a user's message, in the model's chat template.
    streaming: bool = False  # Append the text to the cache in blocks; memory is independent of its length.
    save_document: str | None = None  # Save the compressed text; each question may take --max_new_tokens tokens.
    document: str | None = None  # Ask the compressed text in this directory of --save_document.
    prompts_file: str | None = None  # Many prompts instead, one JSON text or object per line; with --output.
    output: str | None = None  # File for the completions of --prompts_file, one JSON object per line.
    resume: bool = False  # Continue an interrupted run from --output.
    batch_size: str = "8"  # Batch rows for --prompts_file (8), or bytes for their caches (2GiB).
    stop: list[str] = repeatable("TEXT")  # String that finishes a text and is not part of it; repeatable.

    def run(self) -> None:
        """Runs the command."""
        inputs = (self.prompt, self.prompts_file, self.output)
        if inputs == (None,) * 3 and not self.prompt_file and _is_piped():
            dataclasses.replace(self, prompt_file=["-"]).run()
            return
        _check_options(self)
        warn_of_file_name(self.prompt)
        if self.prompts_file is not None:
            assert self.output is not None
            many.complete_file(
                self,
                self.load(),
                self.prompts_file,
                self.output,
                stop=self.stop,
                batch_size=self.batch_size,
                resume=self.resume,
            )
            return
        texts = [*([self.prompt] if self.prompt is not None else []), *map(read_text, self.prompt_file)]
        if "" in texts:
            raise ValueError(
                "the prompt is empty; pass --prompt TEXT, --prompt_file FILE (- for standard input) or --prompts_file"
            )
        llm = self.load()
        if self.document is not None:
            _ask(self, llm.open(self.document), texts)
        elif self.save_document is not None:
            _save_document(self, llm, texts[0], self.save_document)
        else:
            _continue_text(self, llm, texts[0])


def _is_piped() -> bool:
    """Returns whether standard input is a file or a pipe."""
    return sys.stdin is not None and not sys.stdin.isatty()


def _check_options(options: Generate) -> None:
    """Checks that options can be combined.

    Raises:
        ValueError: if they cannot.
    """
    num_texts = (options.prompt is not None) + len(options.prompt_file)
    if options.prompts_file is not None or options.output is not None:
        if options.prompts_file is None or options.output is None:
            raise ValueError("--prompts_file and --output require each other")
        others = ("save_document", "document", "streaming", "chat")
        if conflicts := [name for name in others if getattr(options, name)] + ["prompt"] * bool(num_texts):
            raise ValueError(f"--prompts_file cannot be combined with --{conflicts[0]}")
        options.check()
        return
    if num_texts == 0:
        raise ValueError(
            "a prompt is required: --prompt TEXT, --prompt_file FILE (- for standard input) or --prompts_file"
        )
    if num_texts > 1 and options.document is None:
        raise ValueError("several texts require --document")
    if options.resume:
        raise ValueError("--resume requires --prompts_file")
    if options.save_document is not None and options.document is not None:
        raise ValueError("--save_document cannot be combined with --document")
    if options.chat and options.document is not None:
        raise ValueError("--chat has no effect on a saved document: it is asked as it was read")
    if options.template_options is not None and not options.chat and options.save_document is None:
        raise ValueError("--template_options requires --chat true, or messages in --prompts_file")
    options.check()


def _save_document(options: Generate, llm: LanguageModel, text: str, directory: str) -> None:
    """Compresses a text and saves it."""
    Save(directory).lock()  # an error before the work of reading, not after it
    [document] = read_together(  # `CachedModel.read` would repeat the hint about a text that is the name of a file
        [options.cache(llm)],
        text,
        max_new_tokens=options.max_new_tokens,
        chat=True if options.chat else None,
        seed=options.seed,
        template_options=options.chat_options,
        streaming=options.streaming,
    )
    document.save(directory)
    options.write_summary(f"{document.num_tokens} tokens read and saved", describe_prefix(document.prefix))


def _ask(options: Generate, document: Document, texts: list[str]) -> None:
    """Asks a document every text, all of them as one batch; a plain text is continued with each.

    Raises:
        ValueError: if options of the cache are given, which the document has.
    """
    defaults = Generate()
    for name in ("policy", "budget", "kv_dtype"):
        if getattr(options, name) != getattr(defaults, name):
            raise ValueError(f"--{name} is that of the saved document, {document}; remove the option")
    answer = document.generate if document.messages is None else document.ask
    values = dataclasses.asdict(options.sampling)
    # By default an answer has 256 tokens, or what the question leaves of a capacity of less than twice as many.
    if options.max_new_tokens != defaults.max_new_tokens or document.max_new_tokens >= 2 * defaults.max_new_tokens:
        values["max_new_tokens"] = options.max_new_tokens
    completions, usage = answer(
        texts,
        stop=options.stop,
        seed=options.seed,
        return_details=True,
        **values,
    )
    names = [*(["--prompt"] if options.prompt is not None else []), *options.prompt_file]
    for name, completion in zip(names, completions, strict=True):
        write_output(f"== {name}\n{completion.text}\n")
    options.write_summary(
        f"{len(texts)} answers about a text of {document.num_tokens} tokens",
        describe_prefix(document.prefix),
        f"{format_bytes(usage.cache_bytes)} for the questions and answers",
        policy=document.options["policy"],
    )


def _continue_text(options: Generate, llm: LanguageModel, text: str) -> None:
    """Continues a text."""
    message = {"role": "user", "content": text}
    prompt = llm.encode([message] if options.chat else text, options.chat_options if options.chat else None)
    cache = options.cache(llm)
    engine = cache.engine(rows=1, streaming=options.streaming, max_prefill_tokens=1, stream_interval=1)
    engine.add(
        prompt,
        sampling=options.sampling,
        stop=options.stop,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
    )
    for output in progress.outputs(engine, quiet=options.quiet):
        write_output(output.text)
    write_output("\n")
    usage = engine.usage
    sizes = {name: getattr(usage, name) for name in ("cache_bytes", "host_bytes", "read_bytes", "full_cache_bytes")}
    row = cache.rows(len(prompt), options.max_new_tokens, streaming=options.streaming)[-1]
    share = row.describe_share(sizes, len(prompt) + options.max_new_tokens)
    options.write_summary(
        f"{len(prompt)} tokens read in {usage.prefill_seconds:.2f} s, {usage.new_tokens} generated at "
        f"{usage.tokens_per_second:.1f} tokens/s, {usage.compile_seconds:.1f} s of compilation",
        describe_sizes(sizes, share),
    )
