"""Accuracy and F1, by one rule for the model and for the baselines."""

from __future__ import annotations

from collections.abc import Sequence


def classification_scores(expected: Sequence[int], predicted: Sequence[int], *, num_labels: int) -> tuple[float, float]:
    """Return accuracy and F1 in 0..1: F1 of label 1 when there are two labels, the mean over labels above that.

    The mean is unweighted ("macro") and taken over the labels that occur in either sequence, as scikit-learn does.
    """
    from sklearn.metrics import accuracy_score, f1_score  # slow to import, needed only here

    average = "binary" if num_labels <= 2 else "macro"
    f1 = f1_score(expected, predicted, average=average, zero_division=0.0)
    return float(accuracy_score(expected, predicted)), float(f1)
