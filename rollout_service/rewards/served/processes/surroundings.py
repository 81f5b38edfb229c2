"""The environment of a reward process: what a program needs to run, and what is meant for rewards.

Never the run's own secrets: the keys of gateways, journals, reward servers and metric services are in the
replica's environment, and a reward is other people's code. Invariant: what names or holds a secret gets
through only with the prefix that says it is a reward's.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.core.config.secrets import has_password, is_secret_name

FOR_REWARDS = "REWARD_"
"""Start of the names that a user sets for a reward, its secrets too."""
NAMES = frozenset(
    {
        *("HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "PATH", "SHELL", "TEMP"),
        *("TMP", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "SSL_CERT_DIR", "SSL_CERT_FILE", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        *("no_proxy", "http_proxy", "https_proxy", "all_proxy"),
    }
)
PREFIXES = (
    *("LC_", "XDG_", "CONDA_", "PYTHON", "COVERAGE_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_"),
    *("CUDA_", "NVIDIA_", "ROCR_", "HIP_", "TORCH", "PYTORCH_", "TRITON_", "TRANSFORMERS_", "HF_"),
    *("TOKENIZERS_", "MALLOC_"),
)


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a reward process gets.

    >>> allowed_environment({"PATH": "/bin", "HF_HOME": "/h", "HF_TOKEN": "t", "ASYNCRL_GATEWAY_KEY": "k"})
    {'PATH': '/bin', 'HF_HOME': '/h'}
    """
    return {name: value for name, value in environment.items() if _is_allowed(name, value)}


def _is_allowed(name: str, value: str) -> bool:
    if name.startswith(FOR_REWARDS):
        return True
    is_known = name in NAMES or name.startswith(PREFIXES)
    return is_known and not is_secret_name(name) and not has_password(value)
