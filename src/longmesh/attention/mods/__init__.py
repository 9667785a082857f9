"""Functions of one pair that users give: score_mod and mask_mod."""
