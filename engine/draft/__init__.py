"""Speculation: guesses at the next tokens of an answer, fed and verified in the ordinary step.

A drafter only makes steps fewer or more; what an answer is, the target's own draw at every point decides.
"""
