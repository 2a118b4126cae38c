"""Addresses of the site and of the repository, from the one place that has them."""

import pathlib
import tomllib


def on_config(config):
    file = pathlib.Path(config.config_file_path).parent / "pyproject.toml"
    urls = tomllib.loads(file.read_text())["project"]["urls"]
    config.repo_url = urls["Repository"]
    config.repo_name = "/".join(urls["Repository"].split("/")[-2:])
    config.site_url = urls["Documentation"] + "/"
    return config
