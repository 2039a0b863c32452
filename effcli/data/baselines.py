"""Two baselines that need no neural network: the majority class, and a logistic regression on bags of words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from effcli.data.scores import classification_scores


def baselines(
    train_texts: Sequence[tuple[str, ...]],
    train_labels: Sequence[int],
    eval_texts: Sequence[tuple[str, ...]],
    eval_labels: Sequence[int],
) -> dict[str, float]:
    """Return accuracy and F1 (both in 0..1) on the evaluation rows, under the field names of the record's `Baselines`.

    A text is a tuple of its columns. F1 is that of label 1 where train and eval hold at most two labels, 0 and 1, and
    macro above, as for the model itself.
    """
    num_labels = max(*train_labels, *eval_labels) + 1
    majority = [_majority(train_labels)] * len(eval_labels)
    words = _bag_of_words(train_texts, train_labels, eval_texts)
    majority_accuracy, majority_f1 = classification_scores(eval_labels, majority, num_labels=num_labels)
    words_accuracy, words_f1 = classification_scores(eval_labels, words, num_labels=num_labels)
    return {
        "majority_accuracy": majority_accuracy,
        "majority_f1": majority_f1,
        "bag_of_words_accuracy": words_accuracy,
        "bag_of_words_f1": words_f1,
    }


def _majority(labels: Sequence[int]) -> int:
    """Return the most frequent label, the smallest one of equals."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label))


def _bag_of_words(
    train_texts: Sequence[tuple[str, ...]], train_labels: Sequence[int], eval_texts: Sequence[tuple[str, ...]]
) -> list[int]:
    """Return the labels that a logistic regression on word counts predicts; the majority where it cannot be fitted."""
    # scikit-learn takes about a second to import, so only a run that wants baselines pays for it.
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression

    majority = _majority(train_labels)
    if len(set(train_labels)) < 2:
        return [majority] * len(eval_texts)
    vectorizer = CountVectorizer(analyzer=_column_words)
    try:
        train_counts = vectorizer.fit_transform(train_texts)
    except ValueError:  # no words at all in the training texts
        return [majority] * len(eval_texts)
    model = LogisticRegression(max_iter=1000)
    model.fit(train_counts, list(train_labels))
    return [int(label) for label in model.predict(vectorizer.transform(eval_texts))]


def _column_words(columns: tuple[str, ...]) -> list[str]:
    """Return the lower-case words, each marked with the number of its column: 'cat' left is not 'cat' right."""
    return [f"{number}:{word}" for number, text in enumerate(columns) for word in text.lower().split()]
