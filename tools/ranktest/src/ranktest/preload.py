"""The first module that the forkserver loads, and only it: from here on the server dies with pytest."""

from ranktest.lifetime import die_with_parent

die_with_parent()
