"""tools/text_tokenizers.py and tools/train_bpe.py: each tokenizer, and what training must be told about it."""

import argparse
import base64
import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import text_tokenizers  # noqa: E402
import train_bpe  # noqa: E402
from output_files import UserError  # noqa: E402

LINES = [f"the quick brown fox number {n} jumps over the lazy dog" for n in range(300)]
SAMPLE = "the quick  brown\tfox: naïve café, 日本 <|endoftext|>\n"


def build(*flags):
    parser = argparse.ArgumentParser()
    text_tokenizers.add_tokenizer_flags(parser)
    return text_tokenizers.build(parser.parse_args([str(flag) for flag in flags]))


def build_as_training_does(flags):
    """Megatron's own parser and builder, on these flags."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import _add_tokenizer_args

    args = _add_tokenizer_args(argparse.ArgumentParser()).parse_args(list(flags))
    args.pad_vocab_size = False
    return build_tokenizer(args)


def agrees_with_training(built):
    """Whether training, given the flags that `built` recommends, has the same size and end of document."""
    in_training = build_as_training_does(built.training_flags)
    return (in_training.vocab_size, in_training.eod) == (built.vocab_size, built.eod)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A folder with the four files of tools/train_bpe.py."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    flags = ["--input", str(folder / "in.jsonl"), "--output-dir", str(folder / "out"), "--vocab-size", "300"]
    assert train_bpe.main(flags) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    import sentencepiece

    prefix = tmp_path_factory.mktemp("sp") / "tiny"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(prefix),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def tiktoken_vocabulary(tmp_path_factory):
    """The JSON form that megatron-core reads: the 256 bytes, then merges."""
    tokens = [bytes([n]) for n in range(256)] + [b"th", b"the", b"qu", b" the"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("latin-1")}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path_factory.mktemp("tiktoken") / "vocabulary.json"
    path.write_text(json.dumps(entries))
    return path


# Each type


def test_bytes_are_their_own_ids_and_the_first_other_id_ends_a_document():
    built = build("--tokenizer-type", "ByteLevelTokenizer")
    assert built.tokenize(SAMPLE + "\x00") == list((SAMPLE + "\x00").encode("utf-8"))
    assert (built.vocab_size, built.eod) == (257, 256)
    assert agrees_with_training(built)
    with pytest.raises(UserError, match="needs 257 ids"):
        build("--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", 256)


def test_gpt2_bpe_from_vocab_and_merges_gives_the_ids_of_the_trained_tokenizer(bpe):
    from tokenizers import Tokenizer

    built = build(
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", bpe / "vocab.json", "--merge-file", bpe / "merges.txt"),
    )
    trained = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    ids = built.tokenize(SAMPLE)
    assert ids == trained.encode(SAMPLE).ids and ids[-2] == built.eod == trained.token_to_id("<|endoftext|>")
    assert trained.decode(ids, skip_special_tokens=False) == SAMPLE
    assert built.vocab_size == trained.get_vocab_size() == 300
    assert agrees_with_training(built)


@pytest.mark.parametrize("name", ["", "tokenizer.json"], ids=["folder", "file"])
def test_hugging_face_json_as_folder_or_file(bpe, name):
    pytest.importorskip("tokenizers")
    built = build("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bpe / name)
    gpt2 = build(
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", bpe / "vocab.json", "--merge-file", bpe / "merges.txt"),
    )
    assert built.tokenize(SAMPLE) == gpt2.tokenize(SAMPLE)
    assert (built.vocab_size, built.eod) == (gpt2.vocab_size, gpt2.eod)
    assert agrees_with_training(built)


def test_hugging_face_truncation_and_padding_are_not_applied_to_documents(bpe, tmp_path):
    stored = json.loads((bpe / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    built = build("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tokenizer.json")
    assert len(built.tokenize(" ".join(LINES))) > 1000


def test_an_end_of_document_that_the_files_do_not_tell_is_asked_for(bpe, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"])  # now there are two, and no configuration says which
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "tokenizer.json")
    assert build(*flags).eod is None
    assert build(*flags, "--eod-token", "<end>").eod == 300
    with pytest.raises(UserError, match="'<none>' is not in the vocabulary"):
        build(*flags, "--eod-token", "<none>")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_is_what_training_builds_from_the_same_flags(sentencepiece_model, kind):
    flags = ("--tokenizer-type", kind, "--tokenizer-model", str(sentencepiece_model))
    built = build(*flags)
    assert built.training_flags == flags
    assert built.tokenize(SAMPLE) == build_as_training_does(flags).tokenize(SAMPLE)
    assert built.vocab_size == 320 and agrees_with_training(built)


def test_tiktoken_is_what_training_builds_from_the_same_flags(tiktoken_vocabulary):
    flags = (
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(tiktoken_vocabulary)),
        *("--vocab-size", "270", "--tiktoken-pattern", "v2", "--tiktoken-num-special-tokens", "10"),
    )
    built = build(*flags)
    in_training = build_as_training_does(built.training_flags)
    ids = built.tokenize(SAMPLE)
    assert ids == in_training.tokenize(SAMPLE) and in_training.detokenize(ids) == SAMPLE
    assert built.vocab_size == 270 and agrees_with_training(built)


def test_null_tokenizer_takes_text_that_is_ids_already():
    built = build("--tokenizer-type", "NullTokenizer", "--vocab-size", 50, "--null-tokenizer-eod-id", 7)
    assert built.tokenize("1 2 49") == [1, 2, 49] and built.eod == 7
    assert agrees_with_training(built)


# Mistakes


def test_missing_files_and_flags_are_named(bpe, tmp_path):
    with pytest.raises(UserError, match="needs --vocab-file and --merge-file"):
        build("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", bpe / "vocab.json")
    with pytest.raises(UserError, match=r"none\.json"):
        build("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "none.json", "--merge-file", bpe / "merges.txt")
    with pytest.raises(UserError, match="needs --tokenizer-model"):
        build("--tokenizer-type", "SentencePieceTokenizer")
    with pytest.raises(UserError, match="NullTokenizer needs --vocab-size"):
        build("--tokenizer-type", "NullTokenizer")
    with pytest.raises(UserError, match=r"must be a tokenizer\.json or a folder that holds one"):
        build("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "none.json")


def test_files_of_the_wrong_kind_are_refused(bpe, tmp_path):
    with pytest.raises(UserError, match=r"vocab\.json and merges\.txt of one GPT-2 BPE"):
        files = ("--vocab-file", bpe / "merges.txt", "--merge-file", bpe / "vocab.json")
        build("--tokenizer-type", "GPT2BPETokenizer", *files)
    with pytest.raises(UserError, match="cannot build SentencePieceTokenizer"):
        build("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", bpe / "tokenizer.json")
    with pytest.raises(UserError, match=r"megatron-core cannot build TikTokenizer.*assert isinstance"):
        flags = ("--tokenizer-model", bpe / "tokenizer.json", "--vocab-size", 10, "--tiktoken-num-special-tokens", 7)
        build("--tokenizer-type", "TikTokenizer", *flags)


def test_a_tiktoken_size_that_the_file_cannot_fill_is_said_with_the_right_one(tiktoken_vocabulary):
    with pytest.raises(UserError, match=r"260 \+ 1000 = 1260\. Pass --vocab-size 1260"):
        build("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tiktoken_vocabulary)


def test_our_flags_are_megatrons_flags():
    """They are spelled out in the tool to keep --help quick; here they are held against the installed release."""
    from megatron.training.arguments import _add_tokenizer_args

    theirs = {action.dest: action for action in _add_tokenizer_args(argparse.ArgumentParser())._actions}
    ours = argparse.ArgumentParser()
    text_tokenizers.add_tokenizer_flags(ours)
    for action in ours._actions:
        if action.dest in ("help", "eod_token"):
            continue
        their = theirs[action.dest]
        assert action.option_strings[0] in their.option_strings
        assert (type(action), action.nargs, action.default) == (type(their), their.nargs, their.default), action.dest
    types = set(text_tokenizers.TOKENIZER_TYPES) - {"ByteLevelTokenizer"}
    assert types < set(theirs["tokenizer_type"].choices)


# tools/train_bpe.py


def test_training_twice_gives_the_same_files_and_replaces_none_unasked(bpe, tmp_path, capsys):
    again = ["--input", str(bpe.parent / "in.jsonl"), "--output-dir", str(tmp_path), "--vocab-size", "300"]
    assert train_bpe.main(again) == 0
    assert "preprocess with: --tokenizer-type GPT2BPETokenizer" in capsys.readouterr().out
    for name in train_bpe.FILES:
        assert (tmp_path / name).read_bytes() == (bpe / name).read_bytes()
    assert train_bpe.main(again) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert train_bpe.main([*again, "--overwrite"]) == 0


def test_training_on_plain_text_that_has_too_few_pairs_says_so(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("aa bb")
    flags = ["--input", str(tmp_path / "in.txt"), "--input-format", "text", "--output-dir", str(tmp_path / "out")]
    assert train_bpe.main(flags) == 0
    assert "257 ids, of 8192 asked for" in capsys.readouterr().out


def test_training_stops_at_a_bad_line_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    assert train_bpe.main(["--input", str(tmp_path / "in.jsonl"), "--output-dir", str(tmp_path / "out")]) == 1
    assert f"{tmp_path / 'in.jsonl'}:2: " in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    assert train_bpe.main(["--input", str(tmp_path / "in.jsonl"), "--output-dir", "x", "--vocab-size", "9"]) == 1
    assert "--vocab-size must be at least 257" in capsys.readouterr().err
