//! `chiasm engines`: engines that outlive their frontends.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::launch;
use chiasm_engine::state::{Record, StateDir};
use serde_json::json;

use crate::cli::EnginesArgs;
use crate::error::CliError;
use crate::state_folder;
use crate::stdout::line;

/// Lists engines, or stops them.
pub(crate) async fn run(args: EnginesArgs) -> Result<(), CliError> {
    let state = state_folder::required(args.state_dir.as_deref())?;
    let engines = state.records();
    if args.stop_all {
        for (name, record) in &engines {
            if record.launched.is_some() && !record.frontend.is_alive() {
                stop(&state, name, record).await?;
            }
        }
        return Ok(());
    }
    if let Some(wanted) = args.stop {
        let Some((name, record)) = engines.iter().find(|(name, _)| *name == wanted) else {
            return Err(CliError::Usage(format!(
                "no engine is named {wanted}; chiasm engines lists them"
            )));
        };
        return stop(&state, name, record).await;
    }
    if engines.is_empty() && !args.json {
        line!(
            "no engines: none was launched with --keep-engines or waits on --attach, by what the state folder has"
        );
    }
    for (name, record) in &engines {
        let text = if args.json { as_json(name, record) } else { as_text(name, record) };
        line!("{text}");
    }
    Ok(())
}

/// Ends an engine that no frontend has, and forgets it.
async fn stop(state: &StateDir, name: &str, record: &Record) -> Result<(), CliError> {
    let Some(launched) = record.launched else {
        return Err(CliError::Usage(format!(
            "{name} was started by somebody else, who has to end it"
        )));
    };
    let file = state.file(name);
    // From here on no frontend can take it over.
    if !file.try_lock().map_err(|error| CliError::Usage(error.to_string()))? {
        let pid = record.frontend.pid;
        return Err(CliError::Usage(format!(
            "{name} has a frontend, process {pid}; end that first"
        )));
    }
    launch::end(launched).await;
    file.forget();
    line!("{name} has ended");
    Ok(())
}

/// What becomes of an engine.
fn condition(record: &Record) -> &'static str {
    let served = record.frontend.is_alive();
    match record.report {
        _ if record.is_over() => "ended",
        Some(_) if served => "served",
        None if served => "starting",
        _ if record.launched.is_none() => "unknown",
        _ => "left",
    }
}

fn as_json(name: &str, record: &Record) -> String {
    json!({
        "name": name,
        "model": record.model,
        "condition": condition(record),
        "pid": record.launched.map(|launched| launched.process.pid),
        "frontend_pid": record.frontend.is_alive().then_some(record.frontend.pid),
        "ready_since": record.report.is_some().then_some(record.since),
        "vllm_version": record.vllm_version,
        "handshake": record.handshake,
    })
    .to_string()
}

fn as_text(name: &str, record: &Record) -> String {
    let process =
        record.launched.map_or_else(|| "-".to_owned(), |launched| launched.process.pid.to_string());
    let frontend =
        if record.frontend.is_alive() { record.frontend.pid.to_string() } else { "-".to_owned() };
    let ready = UNIX_EPOCH + Duration::from_secs(record.since);
    let seconds = SystemTime::now().duration_since(ready).unwrap_or_default().as_secs();
    let age = if record.report.is_some() {
        format!("ready for {seconds} s")
    } else {
        "not ready".to_owned()
    };
    format!(
        "{name}  {}  pid {process}  frontend {frontend}  {age}  {}",
        condition(record),
        record.model
    )
}
