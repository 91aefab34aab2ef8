"""The command `eyesplice`.

Commands start engines in processes of their own (`engine_process`), so that this one
stays light, its standard output stays clean, and an unspliced engine is truly so.
"""
