"""The measurements of a profile: storage, links, interference and idle windows."""
