"""Ranks as processes of this machine, joined by gloo or NCCL."""
