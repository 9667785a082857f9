"""Columns of a fragment: keys that one rank needs and one rank owns.

Rows [START, STOP) of OWNER's shard lie at OFFSET of RANK's buffer of STAGE; they are the coordinates
from AT on. Pitfall: START and STOP count in the owner's shard, AT in the whole sequence.
"""

RANK, STAGE, OWNER, START, STOP, OFFSET, AT = range(7)
