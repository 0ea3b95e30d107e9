//! The command line of a headless engine.

use super::engine_flags::{engine_flags, is_engine_flag};
use super::spelling::{is_flag, is_flag_in_full, name};
use super::{GroupPlace, LaunchSpec, ServerFlag};
use crate::error::EngineError;

/// The alternative to vLLM's flags about the place of an engine among those that step with it.
const IN_GROUP: &str = "Chiasm starts all engines of a group; give it their number, which is \
                        --data-parallel-size, and the number of groups as --engines";
/// The flags with the size of a group, which engines get from Chiasm and not as they are.
const GROUP_SIZE: [&str; 2] = ["--data-parallel-size", "-dp"];

/// The flags that Chiasm sets itself, each with an alternative. A flag that ends in `*` stands for
/// all flags with that prefix.
const OWNED: [(&str, &str); 19] = [
    ("--headless", "engines are always headless"),
    ("--data-parallel-*", IN_GROUP),
    ("-dp*", IN_GROUP),
    ("--nnodes", "all processes of an engine have to be on one machine"),
    ("--node-rank", "all processes of an engine have to be on one machine"),
    ("-n", "all processes of an engine have to be on one machine"),
    ("-r", "all processes of an engine have to be on one machine"),
    ("--master-addr", "all processes of an engine have to be on one machine"),
    ("--master-port", "all processes of an engine have to be on one machine"),
    (
        "--mm-processor-cache-gb",
        "give it before -- (in a file: beside vllm-args), where it is another name of \
         --receiver-cache-gb",
    ),
    ("--mm-processor-cache-type", "Chiasm fills the engine's cache and knows its type"),
    ("--enable-prefix-caching", "it is always on"),
    ("--no-enable-prefix-caching", "routing needs the prefix cache"),
    // The spelling of 0.33.
    ("--disable-prefix-caching", "routing needs the prefix cache"),
    ("--kv-events-config*", "Chiasm subscribes to the events and sets where they are published"),
    ("--api-server-count", "a headless engine has no API server"),
    ("-asc", "a headless engine has no API server"),
    ("--model", "write chiasm serve MODEL (in a file: model, beside vllm-args)"),
    // vLLM's frontend marks the requests to watermark. Without the marks, an engine would silently
    // watermark none.
    ("--watermark-config*", "Chiasm asks for no watermarks, so answers would have none"),
];

/// The similarity from which an unknown flag counts as a mistyped one, from 0 to 1. Of vLLM's own
/// flags, 3 % are as similar to another one, so a flag of a newer vLLM may be refused.
const MIN_TYPO_SIMILARITY: f64 = 0.93;

/// The number of steps whose KV events an engine can replay, and so the time that a frontend can
/// be away: about twenty minutes of decoding at 25 ms a step.
///
/// vLLM's default is 10,000. The engine keeps each step's message in memory: 5 to 12 bytes for each
/// token of a new block (measured with vLLM 0.32). 50,000 steps take 0.16 GB if 256 requests decode
/// (3.1 kB a step), 0.34 GB if every tenth step also computes 8,192 tokens of prompts (39 kB), and
/// 2 GB if every step does.
const REPLAYED_STEPS: u32 = 50_000;

/// The flag that Chiasm sets itself if engines have roles.
const KV_TRANSFER: (&str, &str) =
    ("--kv-transfer-config*", "Chiasm sets it for each role, see --kv-connector");
/// The flag that Chiasm sets itself if some engines encode.
const EC_TRANSFER: (&str, &str) =
    ("--ec-transfer-config*", "Chiasm sets it for each role, see --ec-connector");

/// Builds the arguments of `vllm`.
///
/// # Errors
/// A flag of the user is Chiasm's to set or mistyped, or the handshake address is not
/// `tcp://host:port`.
pub(super) fn build(spec: &LaunchSpec) -> Result<Vec<String>, EngineError> {
    check_flags(&spec.extra_args, spec.kv_transfer.is_some(), spec.ec_transfer.is_some())?;
    for flag in spec.extra_args.iter().filter(|arg| is_unknown(arg)).map(|arg| name(arg)) {
        tracing::warn!(
            flag,
            "vLLM 0.31 to 0.33 has no such flag; the engine ends if its vLLM has none"
        );
    }
    let (host, port) = host_and_port(&spec.handshake)?;
    let mut arguments: Vec<String> =
        vec!["serve".into(), spec.model.to_string_lossy().into_owned(), "--headless".into()];
    let mut flag = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    flag("--data-parallel-address", host.to_owned());
    flag("--data-parallel-rpc-port", port.to_owned());
    match spec.place {
        None => flag("--data-parallel-size", "1".to_owned()),
        Some(GroupPlace { size, rank }) => {
            flag("--data-parallel-size", size.to_string());
            // One process per rank: only so has an engine of a group a receiver cache.
            flag("--data-parallel-rank", rank.to_string());
            if let Some(gpus) = &spec.gpus {
                flag("--device-ids", gpus.join(","));
            }
        }
    }
    flag("--mm-processor-cache-type", "lru".to_owned());
    flag("--mm-processor-cache-gb", spec.receiver_cache_gb.to_string());
    if let Some(events) = &spec.kv_events {
        let config = serde_json::json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": events.publish,
            "replay_endpoint": events.replay,
            "buffer_steps": REPLAYED_STEPS,
        });
        flag("--kv-events-config", config.to_string());
    }
    if let Some(config) = &spec.kv_transfer {
        flag("--kv-transfer-config", config.to_string());
    }
    if let Some(config) = &spec.ec_transfer {
        flag("--ec-transfer-config", config.to_string());
    }
    arguments.push("--enable-prefix-caching".to_owned());
    arguments.extend(spec.extra_args.iter().cloned());
    Ok(arguments)
}

/// Checks that an engine can be launched with these flags of the user. `has_kv_transfer` and
/// `has_ec_transfer` say whether Chiasm sets the engine's KV or EC connector.
///
/// # Errors
/// [`EngineError::OwnedFlag`] for a flag that Chiasm sets, or that has no effect on an engine;
/// [`EngineError::MistypedFlag`] for an unknown flag whose name is close to that of a known one.
pub fn check_flags(
    args: &[String],
    has_kv_transfer: bool,
    has_ec_transfer: bool,
) -> Result<(), EngineError> {
    for arg in args {
        let owned_for_role = [(has_kv_transfer, KV_TRANSFER), (has_ec_transfer, EC_TRANSFER)]
            .into_iter()
            .find(|(is_owned, (flag, _))| *is_owned && is_flag(arg, flag))
            .map(|(_, (_, instead))| instead);
        if let Some(instead) = alternative(arg).or(owned_for_role) {
            // The value is left out because it may be a secret.
            let flag = arg.split('=').next().unwrap_or_default().to_owned();
            return Err(EngineError::OwnedFlag { flag, instead });
        }
        if is_unknown(arg) {
            let flag = name(arg);
            let (nearest, similarity) = nearest_flag(&flag);
            if similarity >= MIN_TYPO_SIMILARITY {
                return Err(EngineError::MistypedFlag { flag, nearest });
            }
        }
    }
    Ok(())
}

/// Returns the alternative to an argument that can't be passed to vLLM; `None` for one that can.
///
/// vLLM accepts `_` for `-`, `--flag=value`, `--flag.key value` for JSON and, like every argparse,
/// abbreviations.
fn alternative(arg: &str) -> Option<&'static str> {
    if let Some(&(_, instead)) = OWNED.iter().find(|(owned, _)| is_flag(arg, owned)) {
        return Some(instead);
    }
    ServerFlag::find(arg).filter(|flag| flag.is_refused).map(|flag| flag.instead)
}

/// Returns `true` for a long flag that vLLM 0.31 to 0.33 does not have, in full, abbreviated or
/// with `no-` before its name.
fn is_unknown(arg: &str) -> bool {
    let name = name(arg);
    let positive = name.replacen("--no-", "--", 1);
    let is_known = |name: &str| {
        let mut names =
            engine_flags().chain(ServerFlag::names()).chain([KV_TRANSFER.0, EC_TRANSFER.0]);
        place_of_flag(name).is_some() || names.any(|known| known.starts_with(name))
    };
    let is_flag = arg.starts_with("--") && arg.len() > 2 && !name.contains(char::is_whitespace);
    is_flag && !is_known(&name) && !is_known(&positive)
}

/// Returns the flag for engines whose name is closest to `flag`, with their similarity from 0 to 1.
pub fn nearest_flag(flag: &str) -> (&'static str, f64) {
    engine_flags()
        .map(|known| (known, strsim::jaro(known, flag)))
        .max_by(|(_, left), (_, right)| left.total_cmp(right))
        .unwrap_or_default()
}

/// The place of a flag of `vllm serve` on Chiasm's command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagPlace {
    /// Behind `--`, because engines read it.
    Engine,
    /// Nowhere; the text is the alternative.
    Instead(&'static str),
}

/// Returns the place of a flag of `vllm serve` 0.31 to 0.33; `None` for any other flag.
/// Abbreviations are not recognised.
pub fn place_of_flag(flag: &str) -> Option<FlagPlace> {
    if GROUP_SIZE.iter().any(|size| is_flag_in_full(flag, size)) {
        return Some(FlagPlace::Engine);
    }
    let owned = [KV_TRANSFER, EC_TRANSFER]
        .into_iter()
        .chain(OWNED)
        .find(|(owned, _)| is_flag_in_full(flag, owned));
    if let Some((_, instead)) = owned {
        return Some(FlagPlace::Instead(instead));
    }
    if let Some(server) = ServerFlag::find_in_full(flag) {
        return Some(FlagPlace::Instead(server.instead));
    }
    is_engine_flag(&name(flag)).then_some(FlagPlace::Engine)
}

/// Splits `tcp://host:port` into host and port.
fn host_and_port(address: &str) -> Result<(&str, &str), EngineError> {
    address
        .strip_prefix("tcp://")
        .and_then(|rest| rest.rsplit_once(':'))
        .filter(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port != 0))
        .ok_or_else(|| EngineError::HandshakeAddress { address: address.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::KvEventEndpoints;

    fn spec() -> LaunchSpec {
        LaunchSpec::new("engine_0", "vllm", "/models/m", "tcp://127.0.0.1:5000")
    }

    #[test]
    fn arguments_equal_measured_command_line() {
        let spec = LaunchSpec {
            receiver_cache_gb: 0.5,
            kv_events: Some(KvEventEndpoints::tcp(1, 2)),
            extra_args: vec!["--enforce-eager".into()],
            ..spec()
        };
        let expected = [
            "serve",
            "/models/m",
            "--headless",
            "--data-parallel-address",
            "127.0.0.1",
            "--data-parallel-rpc-port",
            "5000",
            "--data-parallel-size",
            "1",
            "--mm-processor-cache-type",
            "lru",
            "--mm-processor-cache-gb",
            "0.5",
            "--kv-events-config",
            r#"{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:1","replay_endpoint":"tcp://*:2","buffer_steps":50000}"#,
            "--enable-prefix-caching",
            "--enforce-eager",
        ];
        assert_eq!(spec.arguments().unwrap(), expected);
    }

    #[test]
    fn engine_of_a_group_gets_its_rank_and_gpus() {
        let spec = LaunchSpec {
            place: Some(GroupPlace { size: 4, rank: 2 }),
            gpus: Some(vec!["4".to_owned(), "5".to_owned()]),
            ..spec()
        };
        let arguments = spec.arguments().unwrap();
        let value = |flag| {
            let mut pairs = arguments.windows(2).filter(|pair| pair[0] == flag);
            (pairs.next().map(|pair| pair[1].clone()), pairs.count())
        };
        for (flag, expected) in
            [("--data-parallel-size", "4"), ("--data-parallel-rank", "2"), ("--device-ids", "4,5")]
        {
            assert_eq!(value(flag), (Some(expected.to_owned()), 0), "{flag}");
        }
    }

    /// If this test fails for a new version of vLLM, add its flags to one of the lists, according
    /// to the code that reads them in vLLM's Python.
    #[test]
    fn every_vllm_flag_has_a_place() {
        let manifests = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/vllm_drift/manifests");
        let mut seen = 0;
        for file in std::fs::read_dir(manifests).unwrap() {
            let path = file.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let flags = text
                .lines()
                .filter_map(|line| line.strip_prefix("every flag: ")?.strip_suffix(" = there"));
            let before = seen;
            for flag in flags {
                assert_ne!(place_of_flag(flag), None, "{flag} of {}", path.display());
                seen += 1;
            }
            assert!(seen > before + 300, "{} lists no flags", path.display());
        }
        assert_eq!(place_of_flag("--no-such-flag"), None);
        assert_eq!(place_of_flag("--max_model_len"), Some(FlagPlace::Engine));
        let Some(FlagPlace::Instead(instead)) = place_of_flag("--max-num-queued-reqs") else {
            panic!("a flag with an alternative")
        };
        assert!(instead.contains("--max-requests"), "{instead}");
    }

    #[test]
    fn owned_flags_are_refused_in_every_spelling() {
        for flag in [
            "--headless",
            "--headl",
            "--data-parallel-size=2",
            "--nnodes=2",
            "--master_addr",
            "--data_parallel_size",
            "-dp",
            "-dpn",
            "-dp=2",
            "--kv-events-config",
            "--kv_events_config.endpoint",
            "--mm_processor_cache_gb=4",
            "--no-enable-prefix-caching",
            "--api-server-count",
            "--data-par",
            "--api-key=secret",
            "--ssl_keyfile",
            "--port",
        ] {
            let spec = LaunchSpec { extra_args: vec![flag.into()], ..spec() };
            assert!(matches!(spec.arguments(), Err(EngineError::OwnedFlag { .. })), "{flag}");
        }
    }

    #[test]
    fn mistyped_flag_is_refused_with_nearest() {
        let check = |arg: &str| check_flags(&[arg.to_owned()], false, false);
        for arg in ["--max-modle-len", "--max_modle_len=4096", "--max-model-length"] {
            let error = check(arg).unwrap_err().to_string();
            assert!(error.ends_with("did you mean --max-model-len?"), "{error}");
        }
        // Abbreviations, negations, parts of objects and flags of a newer vLLM.
        for arg in [
            "--max-model",
            "--no-async-scheduling",
            "--hf-overrides.a",
            "--brand-new-flag",
            "--",
            "max-modle-len",
        ] {
            check(arg).unwrap();
        }
        assert!(is_unknown("--brand-new-flag") && !is_unknown("--no-async"));
    }

    #[test]
    fn kv_transfer_flag_is_refused_only_with_roles() {
        let arguments = |kv_transfer| {
            let extra_args = vec!["--kv-transfer-config={}".to_owned()];
            LaunchSpec { kv_transfer, extra_args, ..spec() }.arguments()
        };
        assert!(arguments(None).is_ok());
        let config = serde_json::json!({"kv_connector": "NixlConnector"});
        assert!(matches!(arguments(Some(config.clone())), Err(EngineError::OwnedFlag { .. })));
        let arguments =
            LaunchSpec { kv_transfer: Some(config.clone()), ..spec() }.arguments().unwrap();
        let at = arguments.iter().position(|argument| argument == "--kv-transfer-config").unwrap();
        assert_eq!(arguments[at + 1], config.to_string());
    }

    #[test]
    fn engine_flags_with_values_pass() {
        let extra_args = [
            "--block-size",
            "32",
            "--max-model-len=4096",
            "-tp",
            "2",
            "--no-mm-device-do-normalize",
            "-O3",
            "-1",
            "--dtype",
            "--mm-processor-kwargs",
            "{\"min_pixels\":3136}",
            "--model-impl",
            "auto",
            "--kv-cache-dtype",
            "--trust-remote-code",
            "--reasoning-parser=qwen3",
            "--otlp-traces-endpoint",
        ];
        let spec = LaunchSpec { extra_args: extra_args.map(String::from).to_vec(), ..spec() };
        assert!(spec.arguments().unwrap().ends_with(&extra_args.map(String::from)));
    }

    #[test]
    fn unusable_handshake_address_is_refused() {
        for address in ["ipc:///tmp/x", "tcp://127.0.0.1:0", "127.0.0.1:1", "tcp://:1"] {
            let spec = LaunchSpec { handshake: address.into(), ..spec() };
            assert!(
                matches!(spec.arguments(), Err(EngineError::HandshakeAddress { .. })),
                "{address}"
            );
        }
    }
}
