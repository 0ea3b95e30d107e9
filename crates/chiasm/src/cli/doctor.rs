//! Flags of `chiasm doctor`: those of `chiasm serve` that decide what a machine has to have.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::positive;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The model that is to be served: a directory, or the id of a model on the Hugging Face hub, which is not downloaded
    pub(crate) model: Option<PathBuf>,
    /// Number of vLLM engines on this machine, 0 for a frontend of engines elsewhere, which needs no vLLM
    #[arg(long, env = "CHIASM_ENGINES", default_value_t = 1)]
    pub(crate) engines: u32,
    /// The vllm command
    #[arg(long, env = "CHIASM_VLLM", value_name = "PATH", default_value = "vllm")]
    pub(crate) vllm: PathBuf,
    /// GiB of shared memory for each engine's images
    #[arg(long, env = "CHIASM_MM_ARENA_GB", value_parser = positive, default_value_t = 5.0)]
    pub(crate) mm_arena_gb: f64,
    /// Address to listen on
    #[arg(long, env = "CHIASM_HOST", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, env = "CHIASM_PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Print JSON lines
    #[arg(long)]
    pub(crate) json: bool,
}
