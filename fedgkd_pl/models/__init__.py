"""The networks of the paper.

Any module from inputs to logits can be trained. Methods that look inside (a projection head, a
generator of features, t-SNE) ask for two parts more, which every net here has:

* ``features(x)``: what the last layer sees, batch × width;
* ``classifier``: the last layer, so that ``classifier(features(x))`` is the net's output.

:class:`fedgkd_pl.SplitNet` gives them to a net of torchvision, timm or your own.
"""
