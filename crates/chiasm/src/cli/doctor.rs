//! Flags of `chiasm doctor`: the flags of `chiasm serve` that affect the needs of a machine.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::roles::EngineCounts;
use super::{ip_address, positive};

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Model to be served: a directory, or the id of a model on the Hugging Face hub, which is not
    /// downloaded
    pub(crate) model: Option<PathBuf>,
    /// Number of vLLM engines on this machine, in total or by role; 0 if all engines run on other
    /// machines; vLLM is not needed then
    #[arg(long, env = "CHIASM_ENGINES", value_name = "N", default_value = "1")]
    pub(crate) engines: EngineCounts,
    /// The vllm command; a name without a folder is looked up beside chiasm, then in the PATH
    #[arg(long, env = "CHIASM_VLLM", value_name = "PATH", default_value = "vllm")]
    pub(crate) vllm: PathBuf,
    /// GiB of shared memory for each engine's media tensors
    #[arg(long, env = "CHIASM_MM_ARENA_GB", value_parser = positive, default_value_t = 5.0)]
    pub(crate) mm_arena_gb: f64,
    /// Address to listen on; 0.0.0.0 or :: for all addresses of this machine
    #[arg(long, env = "CHIASM_HOST", default_value = "127.0.0.1", value_parser = ip_address)]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, env = "CHIASM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}
