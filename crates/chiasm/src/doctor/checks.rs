//! The checks: pure functions from facts to findings.

use std::time::Duration;

use chiasm_engine::wire::version::{Support, support, window};

use super::deadline::CommandError;
use super::environment::Environment;
use super::facts::{Clock, EngineFacts, Facts, FoundModel, ModelFact, UnknownShm};
use super::finding::Finding;
use crate::open_files::RESERVED_FILES;

/// The limit of open files that the default of `--max-connections` needs, 8192.
const RECOMMENDED_FILES: u64 = 8192 + RESERVED_FILES;
/// The limit of open files that a few engines and clients need.
const MIN_FILES: u64 = 256;
/// The start of 2026. A correct clock is later, because this program was released after it.
const MIN_TIME: Duration = Duration::from_secs(1_767_225_600);
/// The maximum deviation of the two clocks that a busy machine explains.
const MAX_JUMP: Duration = Duration::from_secs(1);

/// Runs all checks. The findings are in the order in which they are best fixed.
pub(super) fn run_all(facts: &Facts) -> Vec<Finding> {
    let mut findings = match &facts.engine_facts {
        Some(facts) => check_engines(facts),
        None => vec![Finding::ok("vllm", "not needed without engines on this machine")],
    };
    findings.push(open_files(facts.open_files));
    findings.push(port(facts));
    findings.push(clock(facts.clock));
    findings.extend(facts.model.as_ref().map(model));
    findings
}

fn check_engines(facts: &EngineFacts) -> Vec<Finding> {
    let mut findings = match &facts.environment {
        Ok(environment) => vec![
            vllm(environment),
            plugin(environment, facts.vllm_plugins.as_deref(), env!("CARGO_PKG_VERSION")),
            processor(environment),
            sandbox(environment.sandbox),
        ],
        Err(reason) => {
            let found = format!("{} can't be inspected: {reason}", facts.vllm.display());
            let advice = "install vLLM beside chiasm, give --vllm PATH, or --engines 0 for a \
                          frontend of engines elsewhere";
            vec![Finding::problem("vllm", found, advice)]
        }
    };
    findings.push(gpus(&facts.gpus, facts.engines.get()));
    findings.push(shared_memory(&facts.free_shm, facts.engines.get(), facts.arena_bytes));
    findings
}

/// Checks vLLM's version against the supported versions.
fn vllm(environment: &Environment) -> Finding {
    let check = "vllm";
    let python = environment.path.display();
    let Some(version) = &environment.vllm else {
        return Finding::problem(
            check,
            format!("{python} has no vLLM"),
            "pip install vllm there, or give --vllm PATH",
        );
    };
    let found = format!("{version} in {python}");
    let supported = format!("vLLM {} is supported", window());
    match support(version) {
        Support::Supported => Finding::ok(check, found),
        Support::Newer => {
            Finding::warning(check, found, format!("it is not tested yet, {supported}"))
        }
        Support::Older => Finding::problem(check, found, format!("it is too old, {supported}")),
        Support::Unknown => {
            Finding::warning(check, found, format!("that is no release, {supported}"))
        }
    }
}

/// Checks the plugin that reads shared memory inside the engines.
///
/// `selected` is `VLLM_PLUGINS`, a list of names. `own` is the version of this program, which the
/// plugin must share because both depend on the memory's layout.
fn plugin(environment: &Environment, selected: Option<&str>, own: &str) -> Finding {
    let check = "plugin";
    let inline = "images are sent in messages until then";
    let Some(version) = &environment.plugin else {
        let found = format!("chiasm_vllm is not installed beside vLLM; {inline}");
        return Finding::warning(
            check,
            found,
            "pip install the wheel of chiasm, or python/chiasm_vllm, there",
        );
    };
    if selected.is_some_and(|names| !names.split(',').any(|name| name == "chiasm")) {
        let found = format!("VLLM_PLUGINS does not list chiasm; {inline}");
        return Finding::warning(check, found, "add chiasm to it");
    }
    let found = format!("chiasm_vllm {version}");
    if version == own {
        return Finding::ok(check, found);
    }
    Finding::warning(check, found, format!("chiasm is {own}: install both from one wheel"))
}

/// Checks the Python modules that vLLM's processor needs.
fn processor(environment: &Environment) -> Finding {
    let found = format!("Python {} at {}", environment.python, environment.path.display());
    if environment.missing.is_empty() {
        return Finding::ok("processor", found);
    }
    let missing = environment.missing.join(", ");
    let found = format!(
        "{found} has no {missing}; without it videos, audio and rare image formats are refused"
    );
    Finding::warning("processor", found, "install vLLM there with its requirements")
}

/// Checks the sandbox of processes that read media with vLLM's processor.
fn sandbox(is_available: bool) -> Finding {
    if is_available {
        return Finding::ok("sandbox", "Landlock and seccomp");
    }
    let found = "the kernel has no Landlock, or a container forbids it: vLLM's processor reads \
                 media without a sandbox";
    let advice = "use a kernel with Landlock (5.13 or later), give --processor native, or accept \
                  media only from clients that you trust";
    Finding::warning("sandbox", found, advice)
}

fn gpus(gpus: &Result<Vec<String>, CommandError>, engines: u32) -> Finding {
    let check = "gpus";
    match gpus {
        Ok(gpus) if gpus.is_empty() => {
            Finding::warning(check, "nvidia-smi lists none", "check the driver")
        }
        Ok(gpus) if (gpus.len() as u64) < u64::from(engines) => {
            let found = format!("{} for {engines} engines ({})", gpus.len(), gpus.join("; "));
            Finding::warning(
                check,
                found,
                "lower --engines, or share them by chiasm serve's --share-gpu",
            )
        }
        Ok(gpus) => Finding::ok(check, gpus.join("; ")),
        Err(CommandError::NotFound) => {
            let advice = "vLLM needs other hardware that it was built for, or is slow on this CPU";
            Finding::warning(check, "none: there is no nvidia-smi", advice)
        }
        Err(CommandError::Failed(reason)) => Finding::problem(
            check,
            format!("nvidia-smi: {reason}"),
            "fix the driver before you start vLLM",
        ),
    }
}

/// Checks that `/dev/shm` has room for the arenas of all engines.
fn shared_memory(free: &Result<u64, UnknownShm>, engines: u32, arena_bytes: u64) -> Finding {
    let check = "shared-memory";
    let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
    let needed = arena_bytes.saturating_mul(u64::from(engines));
    match free {
        Ok(free) if *free >= needed => Finding::ok(
            check,
            format!("/dev/shm has {:.1} GiB free, {:.1} needed", gib(*free), gib(needed)),
        ),
        Ok(free) => {
            let found = format!(
                "/dev/shm has {:.1} GiB free, but the engines may use {:.1}; tensors that do not fit \
                 are sent in messages",
                gib(*free),
                gib(needed)
            );
            Finding::warning(check, found, "enlarge it (docker: --shm-size) or lower --mm-arena-gb")
        }
        Err(reason) => {
            let found = format!("/dev/shm: {reason}; images are sent in messages");
            Finding::warning(check, found, "mount a tmpfs there")
        }
    }
}

fn open_files(limit: Option<u64>) -> Finding {
    let check = "open-files";
    let Some(limit) = limit else { return Finding::ok(check, "no limit") };
    let found = format!("at most {limit}");
    let advice = "raise the hard limit (ulimit -Hn)";
    match limit {
        ..MIN_FILES => Finding::problem(check, found, advice),
        MIN_FILES..RECOMMENDED_FILES => {
            Finding::warning(check, format!("{found} are fewer than --max-connections"), advice)
        }
        _ => Finding::ok(check, found),
    }
}

fn port(facts: &Facts) -> Finding {
    let address = facts.address;
    match &facts.bind_error {
        None if address.port() == 0 => {
            Finding::ok("port", format!("a free one at {}", address.ip()))
        }
        None => Finding::ok("port", format!("{address} is free")),
        Some(reason) => Finding::problem(
            "port",
            format!("{address}: {reason}"),
            "stop the program that listens there, or give --host and --port",
        ),
    }
}

/// Checks the time of day, which matters for TLS certificates and the hub. Deadlines and leases use
/// the monotonic clock.
fn clock(clock: Clock) -> Finding {
    let advice = "set it (NTP): TLS certificates are refused while it is wrong";
    if clock.now < MIN_TIME {
        return Finding::problem("clock", "it shows a year before 2026", advice);
    }
    if clock.jump > MAX_JUMP {
        let found =
            format!("it jumped by {:.1} seconds during the check", clock.jump.as_secs_f64());
        return Finding::warning("clock", found, advice);
    }
    Finding::ok("clock", "steady, and after 2025")
}

fn model(model: &ModelFact) -> Finding {
    let check = "model";
    let name = &model.name;
    match &model.found {
        FoundModel::Readable { native_images: true } => {
            Finding::ok(check, format!("{name}: Chiasm processes its images"))
        }
        FoundModel::Readable { native_images: false } => {
            Finding::ok(check, format!("{name}: text only, or media through vLLM's processor"))
        }
        FoundModel::Unreadable(reason) => Finding::problem(
            check,
            format!("{name}: {reason}"),
            "give a directory with config.json, tokenizer.json and the processor's configuration",
        ),
        FoundModel::HubId => Finding::ok(
            check,
            format!("{name} is no directory: it is taken from the hub or its cache"),
        ),
        FoundModel::Invalid => Finding::problem(
            check,
            format!("{name} is no directory, and no id of a model on the hub"),
            "give one of them, such as Qwen/Qwen2.5-VL-7B-Instruct",
        ),
        FoundModel::Hangs => Finding::problem(
            check,
            format!("{name}: its file system does not answer"),
            "mount it again, or copy the model here",
        ),
    }
}

#[cfg(test)]
#[path = "checks_tests.rs"]
mod tests;
