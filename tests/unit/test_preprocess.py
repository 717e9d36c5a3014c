"""tools/preprocess_data.py: text in, Megatron's .bin/.idx out, complete or not at all."""

import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import documents  # noqa: E402
import output_files  # noqa: E402
import preprocess_data  # noqa: E402
import text_tokenizers  # noqa: E402

EOD = text_tokenizers.BYTES_IN_VOCABULARY
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
TEXTS = ["first document", "zwei: äöü €", "third\nwith lines", "\x00 byte zero is no end of document"]


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def preprocess(source, prefix, *flags, tokenizer=BYTES):
    return preprocess_data.main(["--input", str(source), "--output-prefix", str(prefix), *tokenizer, *map(str, flags)])


def read(stem):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(stem))


def as_texts(dataset):
    return [bytes(document[:-1].astype(np.uint8)).decode("utf-8") for document in dataset]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def output_bytes(prefix, key="text"):
    return [Path(f"{prefix}_{key}_document.{kind}").read_bytes() for kind in ("bin", "idx")]


# What is written


def test_ids_and_document_boundaries_survive_the_round_trip(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    assert preprocess(source, tmp_path / "out", "--append-eod", "--workers", 1) == 0
    dataset = read(tmp_path / "out_text_document")
    expected = [[*text.encode(), EOD] for text in TEXTS]
    assert [document.tolist() for document in dataset] == expected
    assert dataset.sequence_lengths.tolist() == [len(ids) for ids in expected]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert dataset.index.dtype == np.uint16
    assert names_in(tmp_path) == ["in.jsonl", "out_text_document.bin", "out_text_document.idx"]


def test_without_append_eod_only_the_text_is_stored(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    assert preprocess(source, tmp_path / "out", "--workers", 1) == 0
    assert [document.tolist() for document in read(tmp_path / "out_text_document")] == [[*t.encode()] for t in TEXTS]


def test_output_bytes_do_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(documents.read_chunks, "__defaults__", (2000,))  # many chunks out of a small file
    source = write_jsonl(tmp_path / "in.jsonl", [f"{n} " * (n % 50 + 1) for n in range(1500)])
    for workers in (1, 2, 5):
        assert preprocess(source, tmp_path / f"w{workers}", "--append-eod", "--workers", workers) == 0
    one = output_bytes(tmp_path / "w1")
    assert one == output_bytes(tmp_path / "w2") == output_bytes(tmp_path / "w5")
    assert len(read(tmp_path / "w1_text_document")) == 1500


def test_several_keys_give_several_outputs(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"title": "A", "body": "long"}\n{"title": "B", "body": ""}\n')
    assert preprocess(source, tmp_path / "out", "--json-keys", "title", "body", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "out_title_document")) == ["A", "B"]
    assert as_texts(read(tmp_path / "out_body_document")) == ["long"]  # the empty one is left out


def test_empty_documents_are_left_out_and_said(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "", "b"])
    assert preprocess(source, tmp_path / "out", "--append-eod", "--workers", 1) == 0
    assert "2 documents, 4 tokens, 1 empty left out" in capsys.readouterr().out


def test_gzip_patterns_and_blank_lines_are_accepted_in_order(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", ["from b"])
    with gzip.open(tmp_path / "a.jsonl", "wb") as stream:  # recognized by its content, not its name
        stream.write(b'\xef\xbb\xbf{"text": "from a"}\n\n  \n{"text": "also a"}\n')
    assert preprocess(tmp_path / "*.jsonl", tmp_path / "out", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "out_text_document")) == ["from a", "also a", "from b"]


def test_plain_text_is_one_document_per_file_or_per_paragraph(tmp_path):
    source = tmp_path / "in.txt"
    source.write_bytes(b"\n\none\ntwo\n\n \nthree\r\n\r\nfour")
    assert preprocess(source, tmp_path / "f", "--input-format", "text", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "f_text_document")) == [source.read_bytes().decode()]
    assert preprocess(source, tmp_path / "p", "--input-format", "paragraphs", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "p_text_document")) == ["one\ntwo", "three", "four"]


def test_megatron_trains_on_the_output_with_the_flags_printed(tmp_path, capsys):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    texts = [f"document {n} of a small corpus" for n in range(200)]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    assert preprocess(source, tmp_path / "out", "--append-eod", "--workers", 1) == 0
    flags = capsys.readouterr().out.split("train with: ")[1].split()
    assert flags[:2] == ["--data-path", str(tmp_path / "out_text_document")]
    tokenizer = build_as_training_does(flags[2:])
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([flags[1]], None),
        split="8,1,1",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        mid_level_dataset_surplus=0.005,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [50, 5, 5], lambda: True, config).build()
    tokens = train[0]["tokens"].tolist()
    assert len(tokens) == 64 and EOD in tokens and max(tokens) < tokenizer.vocab_size
    whole = bytes(token for token in tokens[tokens.index(EOD) + 1 :] if token != EOD).decode()
    assert whole.startswith("document ")


def build_as_training_does(flags):
    """Megatron's own parser and builder, on these flags."""
    import argparse

    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    args = _add_tokenizer_args(argparse.ArgumentParser()).parse_args(flags)
    args.pad_vocab_size = False
    return build_tokenizer(args)


# Bad input


BAD_LINES = {
    "not JSON": ('{"text": "a"', "not JSON"),
    "not an object": ('["a"]', "must be a JSON object, but is an array"),
    "no such key": ('{"body": "a"}', "no key 'text'; this object's keys are ['body']"),
    "not a string": ('{"text": 7}', "the value of 'text' must be a string, but is a number"),
    "null": ('{"text": null}', "must be a string, but is null"),
    "half a surrogate pair": ('{"text": "\\ud800"}', "half of a surrogate pair"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "byte 0xe9 at offset 13 is not"),
}


@pytest.mark.parametrize("line, problem", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_with_file_and_number_and_nothing_is_left(tmp_path, capsys, line, problem):
    source = tmp_path / "in.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    source.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    assert preprocess(source, tmp_path / "out", "--workers", 1) == 1
    message = capsys.readouterr().err
    assert f"{source}:3: " in message and problem in message and "--skip-bad" in message
    assert names_in(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_bad_line_is_the_one_reported(tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setattr(documents.read_chunks, "__defaults__", (100,))
    lines = [json.dumps({"text": f"line {n}"}) for n in range(1, 200)]
    lines[120] = lines[60] = "broken"
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    assert preprocess(source, tmp_path / "out", "--workers", workers) == 1
    assert f"{source}:61: " in capsys.readouterr().err
    assert names_in(tmp_path) == ["in.jsonl"]


def test_skip_bad_leaves_them_out_and_counts_them(tmp_path, capsys):
    lines = [line if isinstance(line, bytes) else line.encode() for line, _ in BAD_LINES.values()]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([b'{"text": "good"}', *lines, b'{"text": "end"}']))
    assert preprocess(source, tmp_path / "out", "--append-eod", "--skip-bad", "--workers", 2) == 0
    captured = capsys.readouterr()
    assert f"{len(lines)} bad documents left out" in captured.out
    assert captured.err.count(f"left out: {source}:") == preprocess_data.BAD_LINES_SHOWN
    assert as_texts(read(tmp_path / "out_text_document")) == ["good", "end"]


def test_bad_utf8_in_plain_text_is_named_by_its_line(tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_bytes(b"fine\nfine\nbad \xff here\n")
    assert preprocess(source, tmp_path / "out", "--input-format", "text", "--workers", 1) == 1
    assert f"{source}:3: " in capsys.readouterr().err


def test_a_truncated_gzip_file_cannot_be_skipped(tmp_path, capsys):
    whole = gzip.compress(b'{"text": "some text"}\n' * 100)
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(whole[: len(whole) // 2])
    assert preprocess(source, tmp_path / "out", "--skip-bad", "--workers", 1) == 1
    assert "cannot be read beyond line" in capsys.readouterr().err
    assert names_in(tmp_path) == ["in.jsonl.gz"]


def test_input_without_a_document_is_refused(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", [""])
    assert preprocess(source, tmp_path / "out", "--workers", 1) == 1
    assert "at least one document" in capsys.readouterr().err
    assert names_in(tmp_path) == ["in.jsonl"]


def test_a_missing_input_or_output_folder_is_named(tmp_path, capsys):
    assert preprocess(tmp_path / "none.jsonl", tmp_path / "out") == 1
    assert "none.jsonl" in capsys.readouterr().err
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    assert preprocess(source, tmp_path / "nowhere" / "out") == 1
    assert "the output folder must exist" in capsys.readouterr().err


def test_a_vocabulary_that_does_not_fit_the_dtype_is_refused(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["1 2 70000"])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70001"]
    assert preprocess(source, tmp_path / "out", "--dtype", "uint16", "--workers", 1, tokenizer=null) == 1
    assert "70001 ids need 0..70000, but uint16 ends at 65535" in capsys.readouterr().err
    assert preprocess(source, tmp_path / "out", "--workers", 1, tokenizer=null) == 0
    dataset = read(tmp_path / "out_text_document")
    assert dataset.index.dtype == np.int32 and dataset[0].tolist() == [1, 2, 70000]


def test_an_id_outside_the_vocabulary_is_a_bad_line(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["1 2 3", "1 99"])
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
    assert preprocess(source, tmp_path / "out", "--workers", 1, tokenizer=null) == 1
    message = capsys.readouterr().err
    assert f"{source}:2: " in message and "ids 1..99 are not all in 0..49" in message


# Complete or not at all


def test_existing_output_is_kept_without_overwrite(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["new"])
    kept = tmp_path / "out_text_document.idx"
    kept.write_bytes(b"old")
    assert preprocess(source, tmp_path / "out", "--workers", 1) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert kept.read_bytes() == b"old" and names_in(tmp_path) == ["in.jsonl", "out_text_document.idx"]
    assert preprocess(source, tmp_path / "out", "--overwrite", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "out_text_document")) == ["new"]


def test_a_failed_overwrite_keeps_the_old_output(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    assert preprocess(source, tmp_path / "out", "--workers", 1) == 0
    before = output_bytes(tmp_path / "out")
    source.write_text("broken")
    assert preprocess(source, tmp_path / "out", "--overwrite", "--workers", 1) == 1
    assert output_bytes(tmp_path / "out") == before


def test_one_writer_at_a_time(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["a"])
    with (
        pytest.raises(output_files.UserError),
        output_files.OutputFiles([tmp_path / "out_text_document.bin"], overwrite=False),
    ):
        assert preprocess(source, tmp_path / "out", "--workers", 1) == 1
        assert "another one holds" in capsys.readouterr().err
        raise output_files.UserError("leave nothing")
    assert names_in(tmp_path) == ["in.jsonl"]


def start_slow_run(tmp_path, monkeypatch):
    """A run with two workers in a process of its own, caught after its first document; returns (process, workers)."""
    monkeypatch.setattr(documents.read_chunks, "__defaults__", (100,))
    source = write_jsonl(tmp_path / "in.jsonl", [f"document {n}" for n in range(5000)])
    started = tmp_path / "started"
    write_documents = preprocess_data.write_documents

    def slowly(builder, tokens):
        write_documents(builder, tokens)
        builder.data_file.flush()
        started.touch()
        time.sleep(0.05)

    monkeypatch.setattr(preprocess_data, "write_documents", slowly)
    target = lambda: os._exit(preprocess(source, tmp_path / "out", "--workers", 2))  # noqa: E731
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    wait_for(started.exists)
    assert ".out_text_document.bin.partial" in names_in(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    return process, children


def wait_for(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.01)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, number):
    process, workers = start_slow_run(tmp_path, monkeypatch)
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == 128 + number
    assert names_in(tmp_path) == ["in.jsonl", "started"]
    wait_for(lambda: all(map(has_ended, workers)))


def test_a_killed_run_leaves_no_output_and_no_workers_and_the_next_run_takes_over(tmp_path, monkeypatch):
    process, workers = start_slow_run(tmp_path, monkeypatch)
    process.kill()
    process.join(20)
    wait_for(lambda: all(map(has_ended, workers)))
    assert not list(tmp_path.glob("out_*"))
    monkeypatch.undo()
    assert preprocess(tmp_path / "in.jsonl", tmp_path / "out", "--append-eod", "--workers", 1) == 0
    assert as_texts(read(tmp_path / "out_text_document"))[-1] == "document 4999"
    assert names_in(tmp_path) == ["in.jsonl", "out_text_document.bin", "out_text_document.idx", "started"]


def test_a_dead_worker_ends_the_run_with_an_error(tmp_path, monkeypatch):
    process, workers = start_slow_run(tmp_path, monkeypatch)
    os.kill(int(workers[0]), signal.SIGKILL)
    process.join(20)
    assert process.exitcode == 1
    assert names_in(tmp_path) == ["in.jsonl", "started"]


def test_help_is_quick_because_torch_is_not_imported(tmp_path):
    code = (
        "import runpy, sys; sys.argv = ['preprocess_data.py', '--help']\n"
        f"try: runpy.run_path({str(TOOLS / 'preprocess_data.py')!r}, run_name='__main__')\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(TOOLS)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "--append-eod" in done.stdout
