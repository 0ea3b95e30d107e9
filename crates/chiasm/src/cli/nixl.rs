//! Flags of NIXL, by which agents read tensors from frontends' memory.

use std::path::PathBuf;
use std::time::Duration;

use chiasm_backend::PrivateNetwork;
use clap::Args;

use super::positive_seconds;

#[derive(Clone, Debug, Args)]
pub(crate) struct NixlArgs {
    /// Have agents read tensors out of the memory of frontends by NIXL, in place of tensors that
    /// frontends send: NIXL's libnixl_capi.so, as it is in its wheels, or auto, which is that of
    /// vLLM's environment (--vllm). Given on both sides; what is not read is sent
    #[arg(long, env = "CHIASM_NIXL_LIBRARY", value_name = "PATH|auto")]
    pub(crate) nixl_library: Option<PathBuf>,
    /// Bytes of memory that NIXL may read, at a frontend, or read into, at an agent, where what is
    /// kept of tensors lies in it, too
    #[arg(long, env = "CHIASM_NIXL_POOL_BYTES", value_name = "BYTES", default_value_t = 1 << 30)]
    pub(crate) nixl_pool_bytes: usize,
    /// How long such a reading may take before the tensors are sent; the shorter of both sides
    /// counts
    #[arg(long, env = "CHIASM_NIXL_DEADLINE", value_name = "SECONDS", value_parser = positive_seconds, default_value = "5")]
    pub(crate) nixl_deadline: Duration,
    /// Read between machines, unencrypted, on a network that nobody else is on: this machine's
    /// address there and how many of its bits are the network's, such as 10.0.0.7/24. NIXL listens
    /// there, and whoever reaches it can read and write this process's memory [default: within this
    /// machine alone]
    #[arg(long, env = "CHIASM_NIXL_PRIVATE_NETWORK", value_name = "ADDR/BITS")]
    pub(crate) nixl_private_network: Option<PrivateNetwork>,
}
