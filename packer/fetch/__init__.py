"""From a Hub repository to verified files on this disk.

``hub`` asks huggingface_hub what a repository holds, at one commit. ``client`` makes single HTTP requests, ``answers``
judges what came back, ``retry`` says how long to try, and ``transfer`` makes of them one file that resumes inside.
``receipt`` remembers what a folder holds, ``repository`` fetches or checks a whole one, and ``shards`` gives a pack
its headers at once and its shards one by one.
"""
