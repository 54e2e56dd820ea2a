"""Images regressed on the features that the head's gradient gives away.

What a two-layer head leaks of an image's features (`best_features`) survives noise that hides the
image itself from gradient matching; and who has public images of the same kind reads an image off
its features. It takes seconds.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch

from fedsim.contracts.grant import Grant, Knowledge
from fedsim.types import Observation, Reconstruction
from fedsim_attacks._attack_kinds import DirectAttack
from fedsim_attacks.gradient_matching._matching import Matching
from fedsim_attacks.images_from_features import _image_features
from fedsim_attacks.images_from_features._heads import head_of, recover, signals
from fedsim_attacks.images_from_features._image_prior import ImagePrior

_MIXED = 0.3
"""Share of their difference that two features may have exchanged: their images are then blends, of
which the right one is the larger part."""


@final
class FeatureRegression(DirectAttack):
    """Recovers features, and guesses their images by a regression on public ones.

    The guess is that of least squared error among those linear in the features. It is blurred, but
    has the right colors in the right places. Where the head's gradient leaves features in doubt, it
    is the mean of the public images. Nothing is optimized.
    """

    paper: ClassVar[str] = (
        "fedsim: features by best_features; images from features after Dosovitskiy and Brox, "
        "Inverting Visual Representations with Convolutional Networks, CVPR 2016, by ridge "
        "regression"
    )
    needs: ClassVar[Grant] = Grant.least(public="test")

    def reconstruct(
        self, observation: Observation, knowledge: Knowledge, rng: torch.Generator
    ) -> Reconstruction:
        """Returns images, labels and features; the loss is that of the features.

        Raises:
            AttackFailed: no gradient of the model tells features, or the public images do not fit
                the model.
        """
        assert knowledge.public_images is not None
        prior = ImagePrior(observation, knowledge.public_images)
        seed = int(torch.randint(2**31, (), generator=rng))
        recovered = recover(observation, knowledge, seed)
        assert recovered.features is not None
        head = head_of(observation)
        determined_features = _image_features.are_determined(head, recovered.features, _MIXED)
        distribution = (
            prior.given_features(recovered.features)
            if determined_features
            else prior.unconditional(len(recovered.features))
        )
        return Reconstruction(
            images=Matching(observation).pixels(distribution.means),
            labels=signals(observation, recovered.features).labels,
            features=recovered.features,
            features_by=recovered.features_by,
            loss=recovered.loss,
            iterations=0,
        )
