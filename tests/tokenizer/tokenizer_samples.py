"""Small tokenizers of the kinds that models have, made on the spot, each as a model folder's files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.tokenizer.hf import HFTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Then the other foxes jump, too!",
    "Naïve café: déjà vu — “quoted”, 漢字と仮名, привет мир, 👩‍👩‍👧‍👦 🇫🇷 नमस्ते",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: special tokens 0 to 2, the 256 bytes, merges, then two added ordinary tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback(strip: int = 1) -> Tokenizer:
    """As Llama 2 and Mistral: <unk>, <s>, </s>, the 256 bytes, then SentencePiece's pieces with ▁ for a space."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("é", "t"), ("<", "0"), ("a", "b")]
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyzABC.,!<>0x1é漢", *("".join(pair) for pair in merges)]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(content=" ", left=strip, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def word_level() -> Tokenizer:
    """No decoder at all: words are joined by spaces."""
    words = ["[UNK]", "[END]", "hello", "world", "a", "�", "b!"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[END]"])
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "un", "##aff", "##able", "good", ",", "do", "not", "n't"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, tokenizer: Tokenizer, **config: Any) -> HFTokenizer:
    return HFTokenizer.from_folder(write_folder(folder, tokenizer, **config))
