"""Trainers over data x context. They follow what transformers, accelerate and Lightning do within a step.

trainer                        transformers' Trainer; with accelerator, call and refusals
lightning                      strategies of Lightning's Trainer
"""
