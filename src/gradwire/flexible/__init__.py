"""`gw.Flexible`: the density and the collective of top-k follow training and network."""
