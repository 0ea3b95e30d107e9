//! `chiasm simulate`: compares routing policies on a modelled fleet in virtual time.
//!
//! | module | contents |
//! |---|---|
//! | `page` | an HTML page of the runs |
//! | `chart` | one chart of that page |
//! | `side_by_side` | a table of several fleets |

mod chart;
mod page;
mod side_by_side;

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use chiasm_router::{RouterConfig, StageWeights, Weights};
use chiasm_simulate::{
    Arrivals, EngineModel, FrontendModel, PolicyReport, Scenario, SimulateError, Source,
    WorkloadSize, table,
};
use chiasm_types::BlockSize;
use serde_json::json;

use crate::cli::{EngineCounts, SimulateArgs};
use crate::error::CliError;
use crate::stdout::line;

/// The default number of requests per worker of the largest fleet.
const REQUESTS_PER_WORKER: u64 = 1000;
/// The default request rate, as a fraction of the saturation.
const DEFAULT_LOAD: f64 = 0.7;
/// The bytes of a GiB.
const GIB: f64 = (1u64 << 30) as f64;

/// The reports of one workload on one fleet, one for each policy.
struct Run {
    workload: String,
    fleet: EngineCounts,
    /// A description of the fleet, the workload and the request rate.
    about: String,
    reports: Vec<PolicyReport>,
}

/// Prints a table, or JSON lines, per workload and fleet, and writes the page of all runs.
pub(crate) fn run(args: &SimulateArgs) -> Result<(), CliError> {
    // Created first, so that an invalid path fails before the long runs.
    let page = match &args.html {
        Some(path) => Some((path, File::create(path).map_err(unwritable(path))?)),
        None => None,
    };
    let sources: Vec<(String, Source)> = match &args.trace {
        Some(path) => vec![(path.display().to_string(), Source::Trace(path.clone()))],
        None => args
            .workload
            .0
            .iter()
            .map(|workload| (workload.to_string(), generated(args, *workload)))
            .collect(),
    };
    let mut runs = Vec::new();
    for (name, source) in sources {
        let first = runs.len();
        for fleet in args.fleets() {
            runs.push(simulate(args, &name, fleet, source.clone()).map_err(to_usage_error)?);
        }
        if let Some(compared) = side_by_side::table(&runs[first..]).filter(|_| !args.json) {
            line!("{name}, side by side\n\n{compared}");
        }
    }
    if let Some((path, mut file)) = page {
        let command: Vec<String> = std::env::args().skip(1).collect();
        file.write_all(page::render(&command.join(" "), &runs).as_bytes())
            .map_err(unwritable(path))?;
        if !args.json {
            line!("wrote the page {}", path.display());
        }
    }
    Ok(())
}

fn unwritable(path: &Path) -> impl Fn(io::Error) -> CliError + '_ {
    |source| CliError::File { path: path.to_owned(), source }
}

/// Converts an error of the flags or of the trace file.
fn to_usage_error(error: SimulateError) -> CliError {
    CliError::Usage(error.to_string())
}

fn generated(args: &SimulateArgs, workload: chiasm_simulate::Workload) -> Source {
    let size = WorkloadSize {
        images_per_worker: args.size.images_per_worker,
        zipf_exponent: args.size.zipf_exponent,
        chats_per_worker: args.size.chats_per_worker,
    };
    Source::Generated(workload, size)
}

fn simulate(
    args: &SimulateArgs,
    name: &str,
    workers: &EngineCounts,
    source: Source,
) -> Result<Run, SimulateError> {
    let trace = source.trace_summary()?;
    let requests = match trace {
        Some(trace) => args.requests.map_or(trace.requests, |limit| limit.min(trace.requests)),
        None => args.requests.unwrap_or_else(|| largest_fleet(args) * REQUESTS_PER_WORKER),
    };
    let scenario = scenario(args, workers, source, requests);
    let load = args.load.or((args.rate.is_none() && trace.is_none()).then_some(DEFAULT_LOAD));
    let saturation = load.map(|_| scenario.saturation(args.saturation_of)).transpose()?;
    let rate = args.rate.or(load.zip(saturation).map(|(load, saturation)| load * saturation));
    let arrivals = match (trace, rate) {
        (None, rate) => Arrivals::Poisson(rate.unwrap_or_default()),
        (Some(_), None) => Arrivals::Traced(1.0),
        (Some(trace), Some(rate)) => Arrivals::Traced(rate * trace.seconds / trace.requests as f64),
    };
    let reports = scenario.run_all(&args.policy.0, arrivals, usize::from(args.threads))?;
    let rate_text = rate
        .map_or_else(|| "at the trace's times".to_owned(), |rate| format!("{rate:.1} a second"));
    let load_text = load.zip(saturation).map_or_else(String::new, |(load, saturation)| {
        format!(" = {load} of the saturation of {}, {saturation:.1}", args.saturation_of)
    });
    let fleet = format!("{workers} workers{}", describe_frontends(args));
    let about = format!(
        "{name}: {fleet}, {requests} requests, {} of them warm-up, {rate_text}{load_text}",
        scenario.warm_up
    );
    if args.json {
        for report in &reports {
            line!("{}", json_row(args, name, workers, requests, rate, saturation, report));
        }
    } else {
        line!("{about}\n\n{}", table(&reports));
    }
    Ok(Run { workload: name.to_owned(), fleet: workers.clone(), about, reports })
}

/// Returns the number of workers of the largest fleet, for which requests are generated.
fn largest_fleet(args: &SimulateArgs) -> u64 {
    args.fleets().map(EngineCounts::total).max().unwrap_or(1)
}

/// Describes the frontends, if there are several.
fn describe_frontends(args: &SimulateArgs) -> String {
    match (args.frontends, announce_ms(args)) {
        (0 | 1, _) => String::new(),
        (frontends, None) => {
            format!(" and {frontends} frontends, which do not learn of each other's requests")
        }
        (frontends, Some(ms)) => {
            format!(
                " and {frontends} frontends, which learn of each other's requests after {ms} ms"
            )
        }
    }
}

/// Returns the delay of announcements between frontends in milliseconds. Returns `None` without
/// announcements, or with a single frontend.
fn announce_ms(args: &SimulateArgs) -> Option<f64> {
    (args.frontends > 1 && !args.no_announcements).then_some(args.announce_ms)
}

fn scenario(
    args: &SimulateArgs,
    workers: &EngineCounts,
    source: Source,
    requests: u64,
) -> Scenario {
    let model = &args.engine;
    let engine = EngineModel {
        block_size: BlockSize::new(model.block_size).unwrap_or(EngineModel::default().block_size),
        num_blocks: model.num_blocks,
        max_running: model.max_num_seqs,
        max_batched_tokens: model.max_num_batched_tokens,
        overhead: model.step_overhead_ms / 1e3,
        weights: model.weights_ms / 1e3,
        token: 1.0 / model.prefill_rate,
        embed: 1.0 / model.encode_rate,
        transfer_bandwidth: model.transfer_rate * 1e9,
        transfer_latency: model.transfer_latency_ms / 1e3,
        encoder_cache_tokens: model.encoder_cache_tokens,
        embedding_store_bytes: model.embedding_store_bytes,
        receiver_cache_bytes: (model.receiver_cache_gb * GIB) as u64,
        event_delay: model.event_delay_ms / 1e3,
        ..EngineModel::default()
    };
    let weights = Weights {
        prefill: args.weights.prefill_weight,
        encode: args.weights.encode_weight,
        process: args.weights.process_weight,
        queue: args.weights.queue_weight,
        load: args.weights.load_weight,
        balance: args.weights.balance_weight,
        ..Weights::default()
    };
    let stages = StageWeights {
        transfer: args.weights.transfer_weight,
        hop: args.weights.hop_weight,
        disturb: args.weights.disturb_weight,
        // The fleet is on one machine, so the weights between machines don't matter.
        ..StageWeights::default()
    };
    Scenario {
        workers: workers.roles().collect(),
        sized_for: largest_fleet(args) as usize,
        requests,
        warm_up: (requests as f64 * args.warm_up) as u64,
        source,
        seed: args.seed,
        engine,
        frontend: FrontendModel {
            frontends: usize::from(args.frontends),
            announce_delay: announce_ms(args).map(|ms| ms / 1e3),
            threads_per_worker: model.threads_per_worker,
            pixel: model.pixel_ns / 1e9,
            believed_encoder_cache_tokens: model.believed_encoder_cache_tokens,
        },
        router: RouterConfig {
            weights,
            stages,
            temperature: args.weights.routing_temperature,
            ..RouterConfig::default()
        },
    }
}

/// Returns a report and its parameters as a JSON object.
fn json_row(
    args: &SimulateArgs,
    name: &str,
    workers: &EngineCounts,
    requests: u64,
    rate: Option<f64>,
    saturation: Option<f64>,
    report: &PolicyReport,
) -> serde_json::Value {
    let mut row = json!({
        "workload": name,
        "workers": workers.total(),
        "requests": requests,
        "announce_ms": announce_ms(args),
        "seed": args.seed,
        "rate": rate,
        "saturation": saturation,
    });
    if let Some(row) = row.as_object_mut().filter(|_| workers.has_roles()) {
        let counts =
            workers.by_role().iter().map(|(role, count)| (role.name().to_owned(), json!(count)));
        row.insert("roles".to_owned(), serde_json::Value::Object(counts.collect()));
    }
    // A report is an object of numbers, so its conversion can't fail.
    if let (Some(row), Ok(serde_json::Value::Object(report))) =
        (row.as_object_mut(), serde_json::to_value(report))
    {
        row.extend(report);
    }
    row
}
