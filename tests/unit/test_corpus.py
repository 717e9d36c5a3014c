"""tools/make_corpus.py: a corpus from what every Python carries, the same each time."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import make_corpus  # noqa: E402


def run_as_script(output, seed):
    """In a process of its own, with another hash seed: what depends on the order of a set would differ."""
    command = [sys.executable, str(TOOLS / "make_corpus.py"), "--output", str(output), "--max-mb", "2"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
    return output.read_bytes()


def test_two_runs_give_the_same_bytes_within_the_bound(tmp_path):
    first = run_as_script(tmp_path / "a.jsonl", "1")
    assert first == run_as_script(tmp_path / "b.jsonl", "2")
    assert 1_500_000 < len(first) <= 2_000_000


def test_it_holds_english_and_code_and_names_no_path_of_this_machine(tmp_path):
    assert make_corpus.main(["--output", str(tmp_path / "c.jsonl"), "--max-mb", "2"]) == 0
    documents = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text(encoding="utf-8").splitlines()]
    sources = [document["source"] for document in documents]
    assert any(source.startswith("pydoc_data/topics/") for source in sources)
    assert any(source.startswith("Lib/") and source.endswith(".py") for source in sources)
    assert len(set(sources)) == len(sources) and not any(source.startswith("/") for source in sources)
    assert all(document["text"].strip() for document in documents)


def test_a_smaller_bound_keeps_the_english(tmp_path):
    assert make_corpus.main(["--output", str(tmp_path / "c.jsonl"), "--max-mb", "0.1"]) == 0
    assert (tmp_path / "c.jsonl").stat().st_size <= 100_000
    assert b"pydoc_data/topics/" in (tmp_path / "c.jsonl").read_bytes()


def test_a_bound_without_room_and_an_existing_file_are_refused(tmp_path, capsys):
    assert make_corpus.main(["--output", str(tmp_path / "c.jsonl"), "--max-mb", "0.00001"]) == 1
    assert "--max-mb" in capsys.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / "c.jsonl").write_text("mine")
    assert make_corpus.main(["--output", str(tmp_path / "c.jsonl"), "--max-mb", "0.1"]) == 1
    assert (tmp_path / "c.jsonl").read_text() == "mine"
