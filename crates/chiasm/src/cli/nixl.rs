//! Flags of NIXL, by which agents read tensors from frontends' memory.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_backend::PrivateNetwork;
use clap::Args;

use super::positive_seconds;

#[derive(Clone, Debug, Args)]
pub(crate) struct NixlArgs {
    /// Path of NIXL's libnixl_capi.so, as in its wheels, or auto for the one in vLLM's environment
    /// (--vllm). If frontend and agent both have it, agents read tensors from the memory of
    /// frontends; tensors that can't be read are sent in messages
    #[arg(long, env = "CHIASM_NIXL_LIBRARY", value_name = "PATH|auto")]
    pub(crate) nixl_library: Option<PathBuf>,
    /// Size in bytes of NIXL's memory pool. An agent reads tensors from a frontend's pool into its
    /// own, and keeps tensors there
    #[arg(long, env = "CHIASM_NIXL_POOL_BYTES", value_name = "BYTES", default_value_t = 1 << 30)]
    pub(crate) nixl_pool_bytes: usize,
    /// Maximum seconds for an agent to read tensors, after which they are sent in messages; the
    /// lower value of both sides counts
    #[arg(
        long,
        env = "CHIASM_NIXL_DEADLINE",
        value_name = "SECONDS",
        value_parser = positive_seconds,
        default_value = "5"
    )]
    pub(crate) nixl_deadline: Duration,
    /// Private network over which NIXL reads between machines, unencrypted: this machine's address
    /// on it and the prefix length, such as 10.0.0.7/24. Anyone who reaches NIXL there can read and
    /// write this process's memory [default: within this machine only]
    #[arg(long, env = "CHIASM_NIXL_PRIVATE_NETWORK", value_name = "ADDR/BITS")]
    pub(crate) nixl_private_network: Option<PrivateNetwork>,
}
