//! Measures the time that vLLM's processor takes for an item, as seen by the frontend. `cargo xtask
//! bench-peers processor` runs this example as one of the programs it compares. It is controlled
//! over pipes, with one JSON object per line in and out.
//!
//! ```text
//! item --python PROGRAM --model DIR --media DIR
//!
//! in   {"kind": "image", "video" or "clip", "items": [any, …]}
//! out  {"ms": [milliseconds of each], "results": [sum of the tensors' bytes of each]}
//! ```
//!
//! A kind is the name of a file in the folder `--media`. Of `items` only the length counts: that
//! file is processed as often. The first line out is printed once the processor is ready.
//!
//! A time runs from the file in this process's memory to the tensors in this process's memory. It
//! covers a copy of the file, the call, and a copy of the tensors, which in the frontend goes to
//! the engine's shared memory. The target memory was used before, as slots are.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a measurement")]

use std::collections::BTreeMap;
use std::error::Error;
use std::io::stdin;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_processor::{
    ItemCall, ItemLimits, ItemOutput, ItemTensor, ItemValue, Processor, ProcessorOptions, Sandbox,
};
use serde::Deserialize;
use serde_json::{Map, json};

type Failure = Box<dyn Error>;

/// A line of the input: the items to process.
#[derive(Deserialize)]
struct Batch {
    kind: String,
    items: Vec<u64>,
}

fn main() -> Result<(), Failure> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let flags: BTreeMap<&str, &str> =
        arguments.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect();
    let flag = |name: &str| flags.get(name).copied().ok_or_else(|| format!("{name} is missing"));
    let media = Path::new(flag("--media")?);
    let processor = Processor::start(options(flag("--python")?, flag("--model")?)).await?;
    println!("{}", json!({"ready": true}));
    let mut out = Vec::new();
    for line in stdin().lines() {
        let batch: Batch = serde_json::from_str(&line?)?;
        let file = Bytes::from(std::fs::read(media.join(&batch.kind))?);
        let mut ms = Vec::new();
        let mut checksums = Vec::new();
        for _ in &batch.items {
            let start = Instant::now();
            item(&processor, &batch.kind, file.clone(), &mut out).await?;
            ms.push(start.elapsed().as_secs_f64() * 1e3);
            checksums.push(out.iter().map(|&byte| u64::from(byte)).sum::<u64>());
        }
        println!("{}", json!({"ms": ms, "results": checksums}));
    }
    Ok(())
}

/// Returns the default options of `chiasm serve`, with one child.
fn options(python: &str, model: &str) -> ProcessorOptions {
    ProcessorOptions {
        python: python.into(),
        model: model.into(),
        vllm_flags: Vec::new(),
        children: 1,
        queue: 256,
        timeout: Duration::from_secs(60),
        startup_timeout: Duration::from_secs(300),
        restart_pause: Duration::ZERO,
        item_bytes: 2 << 30,
        address_space: 16 << 30,
        limits: ItemLimits::default(),
        sandbox: Sandbox::Auto,
    }
}

/// Processes an item and copies its tensors to `out`.
async fn item(
    processor: &Processor,
    kind: &str,
    file: Bytes,
    out: &mut Vec<u8>,
) -> Result<(), Failure> {
    let none = Map::new();
    let modality = if kind == "image" { kind } else { "video" };
    let output = processor
        .item(ItemCall { modality, file, processor_kwargs: &none, io_kwargs: &none })
        .await?;
    let tensors: Vec<&ItemTensor> =
        output.fields.iter().flat_map(|field| tensors(&field.value)).collect();
    out.resize(tensors.iter().map(|tensor| tensor.byte_len()).sum(), 0);
    copy(&output, &tensors, out)
}

fn copy(output: &ItemOutput, tensors: &[&ItemTensor], mut out: &mut [u8]) -> Result<(), Failure> {
    for tensor in tensors {
        let (target, rest) = out.split_at_mut(tensor.byte_len());
        output.read(tensor, target)?;
        out = rest;
    }
    Ok(())
}

/// Returns the tensors of a value.
fn tensors(value: &ItemValue) -> Vec<&ItemTensor> {
    match value {
        ItemValue::Tensor(tensor) => vec![tensor],
        ItemValue::List(list) => list.iter().flat_map(tensors).collect(),
        ItemValue::Int(_) | ItemValue::Float(_) => Vec::new(),
    }
}
