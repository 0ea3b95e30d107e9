//! Messages exchanged with vLLM's own types, without an engine: vLLM's types decode our messages,
//! and we decode theirs.
//!
//! `cargo xtask vllm-drift VERSION` runs this for one version of vLLM, in turn with
//! `python/vllm_drift/exchange.py`, over the folder in `CHIASM_EXCHANGE_DIR`. A message is a set of
//! files `NAME.fN`, its frames. `requests.json` and `outputs.json` list the messages and their
//! meanings; the writer of a message also writes its meaning.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod meanings;
mod requests;

use std::fs;
use std::path::PathBuf;

use bytes::Bytes;
use serde_json::{Value, json};

fn folder() -> PathBuf {
    std::env::var_os("CHIASM_EXCHANGE_DIR")
        .expect("CHIASM_EXCHANGE_DIR names the folder of the exchange")
        .into()
}

#[test]
#[ignore = "half of an exchange with vLLM's types: cargo xtask vllm-drift"]
fn requests_are_written() {
    let folder = folder();
    let mut list = Vec::new();
    for requests::Message { name, kind, frames, means } in requests::all() {
        for (i, frame) in frames.iter().enumerate() {
            fs::write(folder.join(format!("{name}.f{i}")), frame).unwrap();
        }
        list.push(json!({"name": name, "kind": kind, "frames": frames.len(), "means": means}));
    }
    fs::write(folder.join("requests.json"), Value::from(list).to_string()).unwrap();
}

#[test]
#[ignore = "half of an exchange with vLLM's types: cargo xtask vllm-drift"]
fn outputs_are_read() {
    let folder = folder();
    let list: Vec<Value> =
        serde_json::from_slice(&fs::read(folder.join("outputs.json")).unwrap()).unwrap();
    assert!(!list.is_empty());
    let mut different = Vec::new();
    for message in &list {
        let name = message["name"].as_str().unwrap();
        let frames: Vec<Bytes> = (0..message["frames"].as_u64().unwrap())
            .map(|i| fs::read(folder.join(format!("{name}.f{i}"))).unwrap().into())
            .collect();
        let read = meanings::read(message["kind"].as_str().unwrap(), &frames);
        let read = read.map(without_empty);
        let meant = without_empty(message["means"].clone());
        match read {
            Ok(read) if read == meant => println!("{name}: read as meant"),
            Ok(read) => different.push(format!("{name}\n  meant {meant}\n  read  {read}")),
            Err(error) => different.push(format!("{name}: {error}")),
        }
    }
    assert!(
        different.is_empty(),
        "{} of {} are read wrongly:\n{}",
        different.len(),
        list.len(),
        different.join("\n")
    );
}

/// Removes empty values, because Python's `None`, an empty list and a missing field are equal on
/// the wire.
fn without_empty(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let entries = map.into_iter().map(|(key, value)| (key, without_empty(value)));
            Value::Object(entries.filter(|(_, value)| !is_empty(value)).collect())
        }
        Value::Array(list) => list.into_iter().map(without_empty).collect(),
        other => other,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(value) => value.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
