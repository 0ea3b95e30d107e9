//! The settings of engines, router, media loader and server, from the flags.

use std::time::Duration;

use axum::http::StatusCode;
use chiasm_api::openai::BodyLimits;
use chiasm_engine::{ArenaPolicy, ClientOptions, CountedRows, FormatPolicy};
use chiasm_fleet::Patience;
use chiasm_media::{ByteBudget, ImageLimits, MediaConfig, MediaLimits, MediaLoader};
use chiasm_pipeline::PipelineLimits;
use chiasm_pipeline::model::ServedModel;
use chiasm_router::{BusyThresholds, Decoding, RouterConfig, Weights};
use chiasm_server::{HttpLimits, RoutingOptions, TrustedProxies};

use crate::cli::{LimitArgs, MediaArgs, MmTransfer, RoutingArgs, ServeArgs, TensorFormats};
use crate::error::CliError;
use crate::vllm_flags::VllmFlags;

/// vLLM's own default of `--mm-processor-cache-gb`.
const DEFAULT_RECEIVER_CACHE_GB: f64 = 4.0;

/// GiB for tensors that are being written, sent, or used by requests after their eviction.
const ARENA_GB_IN_FLIGHT: f64 = 1.0;

/// Returns the format of image tensors: raw values where the engine normalises. vLLM normalises by
/// default from some version on, for the families that support it.
pub(super) fn format_policy(
    args: &ServeArgs,
    flags: &VllmFlags,
    model: &ServedModel,
) -> FormatPolicy {
    match args.engines.mm_tensor_format.or(args.engines.pixels).unwrap_or(TensorFormats::Auto) {
        TensorFormats::Raw => FormatPolicy::Raw,
        TensorFormats::Float => FormatPolicy::Float,
        TensorFormats::Auto => {
            let since = model.vision.as_ref().and_then(|vision| vision.engine_normalizes_since());
            since.filter(|_| flags.normalize).map_or(FormatPolicy::Float, FormatPolicy::RawSince)
        }
    }
}

/// Returns the size of the engines' receiver caches in GiB. Launched engines cache nothing with
/// `--mm-transfer off`.
pub(super) fn receiver_cache_gb(args: &ServeArgs) -> f64 {
    match args.engines.mm_transfer {
        MmTransfer::Off => 0.0,
        _ => args.engines.receiver_cache_gb.unwrap_or(DEFAULT_RECEIVER_CACHE_GB),
    }
}

/// Returns the arena policy. A model without media needs no arena.
///
/// An engine's receiver cache keeps tensors in place, in the arena. The arena must therefore hold
/// the whole cache and the tensors in flight.
pub(super) fn arena_policy(args: &ServeArgs, accepts_media: bool) -> ArenaPolicy {
    if !accepts_media {
        return ArenaPolicy::Never;
    }
    let gib =
        args.engines.mm_arena_gb.unwrap_or_else(|| receiver_cache_gb(args) + ARENA_GB_IN_FLIGHT);
    let bytes = (gib * (1_u64 << 30) as f64) as u64;
    match args.engines.mm_transfer {
        MmTransfer::Auto => ArenaPolicy::Preferred { bytes },
        MmTransfer::Shm => ArenaPolicy::Required { bytes },
        MmTransfer::Inline | MmTransfer::Off => ArenaPolicy::Never,
    }
}

/// Returns the size of the engines' receiver caches in bytes, or `None` if it is 0 or unknown.
///
/// An attached engine does not report the size. An engine without a cache would die from an item
/// without data, so an unknown size counts as no cache.
pub(super) fn receiver_cache_bytes(args: &ServeArgs) -> Option<u64> {
    if !args.engines.attach.is_empty() && args.engines.receiver_cache_gb.is_none() {
        return None;
    }
    cache_bytes(receiver_cache_gb(args))
}

/// Converts GiB to bytes as vLLM does, without the fraction of a byte. Returns `None` for no cache.
pub(crate) fn cache_bytes(gib: f64) -> Option<u64> {
    let bytes = gib * (1_u64 << 30) as f64;
    (bytes >= 1.0).then_some(bytes as u64)
}

/// Returns the client options that depend on the model.
pub(crate) fn client_options(model: &ServedModel) -> ClientOptions {
    let counted = model.vision.as_ref().map_or(&[][..], |vision| vision.counted_rows());
    ClientOptions {
        vocab_size: model.last_token().0.checked_add(1),
        counted_rows: counted
            .iter()
            .map(|&(rows_of, grid)| CountedRows { rows_of: rows_of.into(), grid: grid.into() })
            .collect(),
        ..ClientOptions::default()
    }
}

pub(super) fn patience(args: &ServeArgs) -> Patience {
    Patience {
        suspect_after: args.engines.engine_timeout,
        hung_after: args.engines.engine_hang_timeout,
    }
}

pub(super) fn router_config(args: &RoutingArgs) -> RouterConfig {
    RouterConfig {
        policy: args.policy,
        weights: Weights {
            prefill: args.prefill_weight,
            fetch: args.fetch_weight,
            encode: args.encode_weight,
            process: args.process_weight,
            queue: args.queue_weight,
            load: args.load_weight,
            balance: args.balance_weight,
        },
        decoding: Decoding {
            steps_per_second: args.decode_steps_per_second,
            read_per_block: args.decode_read_per_block,
        },
        temperature: args.routing_temperature,
        busy: BusyThresholds {
            kv_usage: args.busy_kv_usage,
            pending_tokens: args.busy_pending_tokens,
            waiting: args.busy_waiting,
        },
        approximate_ttl: args.approximate_ttl,
        max_sessions: args.max_sessions,
        index_max_bytes: Some(args.index_max_bytes),
        ..RouterConfig::default()
    }
}

pub(super) fn routing_options(args: &RoutingArgs) -> Result<RoutingOptions, CliError> {
    let session_header = match args.session_header.as_str() {
        "" => None,
        name => Some(name.parse().map_err(|_| {
            CliError::Usage(format!("--session-header '{name}' is not the name of an HTTP header"))
        })?),
    };
    let busy_status = StatusCode::from_u16(args.busy_status).map_err(|_| {
        CliError::Usage(format!("--busy-status {} is not an HTTP status", args.busy_status))
    })?;
    Ok(RoutingOptions { session_header, busy_status })
}

/// Checks that local media come from a folder that exists.
pub(super) fn check_media_folder(args: &MediaArgs) -> Result<(), CliError> {
    match args.allowed_local_media_path.as_deref() {
        Some(folder) if !folder.is_dir() => Err(CliError::Usage(format!(
            "--allowed-local-media-path: {} is not a folder",
            folder.display()
        ))),
        _ => Ok(()),
    }
}

/// Creates the loader of all media.
pub(super) fn media_loader(args: &MediaArgs, has_processor: bool) -> Result<MediaLoader, CliError> {
    Ok(MediaLoader::new(media_config(args, has_processor), byte_budget(args))?)
}

/// Returns the settings of the media loader. With vLLM's processor (`has_processor`), the loader
/// accepts image formats that Chiasm can't read.
fn media_config(args: &MediaArgs, has_processor: bool) -> MediaConfig {
    let MediaArgs {
        ref allowed_local_media_path,
        ref allowed_media_domains,
        ref allowed_media_ports,
        allow_private_media,
        max_image_bytes,
        max_image_pixels,
        max_image_side,
        max_image_aspect_ratio,
        max_image_scans,
        max_video_bytes,
        max_audio_bytes,
        media_cache_bytes,
        max_media_names,
        media_timeout,
        media_connect_timeout,
        media_first_byte_timeout,
        media_min_rate,
        media_max_redirects,
        max_media_fetches,
        max_media_fetches_per_origin,
        media_min_freshness,
        media_max_freshness,
        media_error_ttl,
        // Used in `limits`.
        limit_mm_per_prompt: _,
        processed_cache_bytes: _,
        // Used in `byte_budget`.
        max_bytes_in_flight: _,
    } = *args;
    MediaConfig {
        limits: MediaLimits {
            image: ImageLimits {
                max_bytes: max_image_bytes,
                max_pixels: max_image_pixels,
                max_side: max_image_side,
                max_aspect_ratio: max_image_aspect_ratio,
                max_scans: max_image_scans,
            },
            opaque_images: has_processor,
            video_bytes: max_video_bytes,
            audio_bytes: max_audio_bytes,
        },
        connect_timeout: media_connect_timeout,
        first_byte_timeout: media_first_byte_timeout,
        // Has no flag.
        stall_timeout: MediaConfig::default().stall_timeout,
        min_body_rate: media_min_rate,
        total_timeout: media_timeout,
        max_fetches: max_media_fetches,
        max_fetches_per_origin: max_media_fetches_per_origin,
        max_redirects: media_max_redirects,
        cache_bytes: media_cache_bytes,
        max_known_names: max_media_names,
        failure_ttl: media_error_ttl,
        allowed_local_media_path: allowed_local_media_path.clone(),
        allow_private_addresses: allow_private_media,
        allowed_ports: allowed_media_ports.clone(),
        allowed_domains: allowed_media_domains.clone(),
        min_freshness: media_min_freshness,
        max_freshness: media_max_freshness,
    }
}

/// Returns the budget for media bytes: the bytes in flight plus the caches, so that full caches
/// take no room from requests.
fn byte_budget(args: &MediaArgs) -> ByteBudget {
    let caches = args.media_cache_bytes.saturating_add(args.processed_cache_bytes);
    ByteBudget::new(args.max_bytes_in_flight.saturating_add(caches))
}

/// The limits of a server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) http: HttpLimits,
    pub(crate) body: BodyLimits,
    pub(crate) pipeline: PipelineLimits,
}

/// Returns the server's limits as the flags set them.
pub(super) fn limits(args: &ServeArgs) -> Limits {
    let LimitArgs {
        max_body_bytes,
        max_json_values,
        max_messages,
        max_content_parts,
        body_timeout,
        min_body_rate,
        max_connections,
        head_timeout,
        write_timeout,
        max_requests,
        ref trusted_proxies,
        max_request_cost,
        cpu_threads,
        first_token_timeout,
        request_timeout,
        quarantine,
        // Limits of the process.
        max_unread_bytes: _,
        async_threads: _,
        // Objectives, which are only counted.
        slo_ttft: _,
        slo_itl: _,
        // Times of the shutdown.
        drain_delay: _,
        drain_timeout: _,
    } = args.limits;
    Limits {
        http: HttpLimits {
            body_bytes: max_body_bytes,
            body_timeout,
            min_body_rate,
            connections: max_connections,
            head_timeout,
            write_timeout,
            trusted_proxies: TrustedProxies::new(trusted_proxies.clone()),
        },
        body: BodyLimits {
            json_values: max_json_values,
            messages: max_messages,
            content_parts: max_content_parts,
        },
        pipeline: PipelineLimits {
            requests: max_requests,
            items_per_prompt: args.media.limit_mm_per_prompt.clone(),
            processed_bytes: args.media.processed_cache_bytes,
            cpu_threads: cpu_threads.unwrap_or(PipelineLimits::default().cpu_threads),
            request_cost: max_request_cost,
            first_token_timeout: non_zero(first_token_timeout),
            request_timeout: non_zero(request_timeout),
            quarantine,
        },
    }
}

/// Returns `None` for 0, which means no limit.
fn non_zero(limit: Duration) -> Option<Duration> {
    (!limit.is_zero()).then_some(limit)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn limits_follow_flags() {
        let limits_for = |flags: &[&str]| {
            let Command::Serve(args) =
                Cli::parse_from([&["chiasm", "serve", "m"], flags].concat()).command
            else {
                panic!("serve")
            };
            limits(&args)
        };
        let mut defaults = Limits::default();
        defaults.pipeline.cpu_threads = limits_for(&[]).pipeline.cpu_threads;
        assert_eq!(limits_for(&[]), defaults);
        let flags = [
            "--min-body-rate=5",
            "--write-timeout=7",
            "--max-requests=9",
            "--trusted-proxies=10.0.0.0/8,fd00::1",
        ];
        let networks = ["10.0.0.0/8", "fd00::1"].map(|network| network.parse().unwrap());
        let http = HttpLimits {
            min_body_rate: 5,
            write_timeout: Duration::from_secs(7),
            trusted_proxies: TrustedProxies::new(networks.into()),
            ..HttpLimits::default()
        };
        let pipeline = PipelineLimits { requests: Some(9), ..defaults.pipeline };
        let changed = Limits { http, pipeline, ..defaults };
        assert_eq!(limits_for(&flags), changed);
        assert!(
            Cli::try_parse_from(["chiasm", "serve", "m", "--trusted-proxies", "example.com"])
                .is_err()
        );
    }
}
