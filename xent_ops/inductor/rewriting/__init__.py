"""The pass over Dynamo's graph that replaces F.cross_entropy, with or without the head before it."""
