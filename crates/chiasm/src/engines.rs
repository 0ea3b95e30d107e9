//! `chiasm engines`: lists or stops engines that outlive their frontends.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_engine::launch;
use chiasm_engine::state::{Record, StateDir};
use serde_json::json;

use crate::cli::EnginesArgs;
use crate::error::CliError;
use crate::state_folder;
use crate::stdout::line;

/// Lists the engines of the state folder, or stops some.
pub(crate) async fn run(args: EnginesArgs) -> Result<(), CliError> {
    let state = state_folder::open_required(args.state_dir.as_deref())?;
    let engines = state.records();
    if args.stop_all {
        for (name, record) in &engines {
            if record.launched.is_some() && !record.frontend.is_alive() {
                stop(&state, name, record).await?;
            }
        }
        return Ok(());
    }
    if let Some(stopped) = args.stop {
        let Some((name, record)) = engines.iter().find(|(name, _)| *name == stopped) else {
            return Err(CliError::Usage(format!(
                "no engine is named {stopped}; chiasm engines lists them"
            )));
        };
        return stop(&state, name, record).await;
    }
    if engines.is_empty() && !args.json {
        line!(
            "no engines: the state folder has none that was launched with --keep-engines \
             or is attached with --attach"
        );
    }
    for (name, record) in &engines {
        let text = if args.json { to_json(name, record) } else { to_text(name, record) };
        line!("{text}");
    }
    Ok(())
}

/// Stops an engine that no frontend uses, and removes its record.
async fn stop(state: &StateDir, name: &str, record: &Record) -> Result<(), CliError> {
    let Some(launched) = record.launched else {
        return Err(CliError::Usage(format!(
            "{name} was not launched by chiasm: stop it where it was started"
        )));
    };
    let file = state.file(name);
    // While the lock is held, no frontend can take the engine over.
    if !file.try_lock().map_err(|error| CliError::Usage(error.to_string()))? {
        let pid = record.frontend.pid;
        return Err(CliError::Usage(format!(
            "the frontend with process id {pid} uses {name}: stop it first"
        )));
    }
    launch::terminate(launched).await;
    file.forget();
    line!("{name} has ended");
    Ok(())
}

/// Returns the state that the list shows for an engine.
fn condition(record: &Record) -> &'static str {
    let has_frontend = record.frontend.is_alive();
    if record.has_ended() {
        "ended"
    } else if has_frontend && record.report.is_some() {
        "served"
    } else if has_frontend {
        "starting"
    } else if record.launched.is_none() {
        "unknown"
    } else {
        "left"
    }
}

fn to_json(name: &str, record: &Record) -> String {
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

fn to_text(name: &str, record: &Record) -> String {
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
