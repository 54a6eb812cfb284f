"""One job on several engines, in other processes or on other machines: the same rows, output and resume as on one."""
