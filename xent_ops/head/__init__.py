"""Losses from hidden states, computed by chunks of rows. The operators in ops/linear/ check arguments and call this."""
