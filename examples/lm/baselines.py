"""The n-gram baselines, scored on the same validation tokens as the trained models."""

import numpy as np

DISCOUNT = 0.75


def unigram_probabilities(train: np.ndarray, vocab: int) -> np.ndarray:
    """Add-one smoothed frequencies of the training tokens, (vocab,)."""
    counts = np.bincount(train, minlength=vocab) + 1.0
    return counts / counts.sum()


def unigram_loss(train: np.ndarray, targets: np.ndarray, vocab: int) -> float:
    """Mean loss of the unigram model, in nats a target token."""
    return float(-np.log(unigram_probabilities(train, vocab)[targets]).mean())


def bigram_loss(train: np.ndarray, inputs: np.ndarray, targets: np.ndarray, vocab: int) -> float:
    """Mean loss of the bigram model with absolute discounting, in nats a target token.

    p(w | v) = max(c(v, w) - D, 0) / c(v) + D * kinds(v) / c(v) * p(w), where kinds(v) counts the
    different tokens seen after v, and p(w) is the unigram. If no token was seen after v, it is
    p(w).
    """
    train = train.astype(np.int64)
    pairs, pair_counts = np.unique(train[:-1] * vocab + train[1:], return_counts=True)
    followers = np.bincount(train[:-1], minlength=vocab)
    kinds = np.bincount(pairs // vocab, minlength=vocab)

    inputs, targets = inputs.ravel().astype(np.int64), targets.ravel().astype(np.int64)
    wanted = inputs * vocab + targets
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, pair_counts[place], 0)
    total = np.maximum(followers[inputs], 1)
    backoff = np.where(followers[inputs] > 0, DISCOUNT * kinds[inputs] / total, 1.0)
    unigram = unigram_probabilities(train, vocab)[targets]
    return float(-np.log(np.maximum(seen - DISCOUNT, 0.0) / total + backoff * unigram).mean())
