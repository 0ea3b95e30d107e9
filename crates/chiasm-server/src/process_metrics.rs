//! Metrics of this process: memory, file descriptors and CPU time, under the names of Prometheus'
//! own client libraries.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// A collector that reads `/proc` on each scrape. Systems without `/proc`, and containers that hide
/// it, have no such metrics.
#[derive(Debug)]
pub(crate) struct ProcessMetrics {
    ticks_per_second: f64,
    page_bytes: u64,
    /// The time at which this machine was started, in seconds since 1970.
    machine_start: Option<f64>,
}

/// The fields of `/proc/self/stat` that are used (proc_pid_stat(5)).
#[derive(Debug, PartialEq)]
struct Stat {
    /// The CPU time in clock ticks, in user and in kernel mode.
    cpu: u64,
    /// The process's start, in clock ticks after the machine's start.
    started: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl ProcessMetrics {
    pub(crate) fn new() -> Self {
        let machine = fs::read_to_string("/proc/stat").ok();
        let start = machine
            .as_deref()
            .and_then(|stat| stat.lines().find_map(|line| line.strip_prefix("btime ")));
        Self {
            ticks_per_second: rustix::param::clock_ticks_per_second() as f64,
            page_bytes: rustix::param::page_size() as u64,
            machine_start: start.and_then(|seconds| seconds.trim().parse().ok()),
        }
    }
}

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut put = |name, help, unit: Option<Unit>, metric: &dyn EncodeMetric| {
            metric.encode(encoder.encode_descriptor(
                name,
                help,
                unit.as_ref(),
                metric.metric_type(),
            )?)
        };
        if let Some(stat) =
            fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(Stat::parse)
        {
            let seconds = |ticks: u64| ticks as f64 / self.ticks_per_second;
            let resident = ConstGauge::new(stat.resident_pages * self.page_bytes);
            put(
                "process_resident_memory",
                "Memory of this process in RAM, shared memory included",
                Some(Unit::Bytes),
                &resident,
            )?;
            let addresses = ConstGauge::new(stat.virtual_bytes);
            put(
                "process_virtual_memory",
                "Address space of this process",
                Some(Unit::Bytes),
                &addresses,
            )?;
            let cpu = ConstCounter::new(seconds(stat.cpu));
            put("process_cpu", "CPU time of this process", Some(Unit::Seconds), &cpu)?;
            if let Some(machine_start) = self.machine_start {
                let started = ConstGauge::new(machine_start + seconds(stat.started));
                put(
                    "process_start_time",
                    "When this process was started, in seconds since 1970",
                    Some(Unit::Seconds),
                    &started,
                )?;
            }
        }
        if let Some(open) = open_descriptors() {
            put(
                "process_open_fds",
                "File descriptors that are open",
                None,
                &ConstGauge::new(open),
            )?;
        }
        if let Some(limit) =
            fs::read_to_string("/proc/self/limits").ok().as_deref().and_then(descriptor_limit)
        {
            put(
                "process_max_fds",
                "File descriptors that may be open",
                None,
                &ConstGauge::new(limit),
            )?;
        }
        Ok(())
    }
}

/// Returns the number of open file descriptors. Since Linux 6.2 it is the directory's size; before,
/// the entries are counted.
fn open_descriptors() -> Option<u64> {
    match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => fs::read_dir("/proc/self/fd").ok().map(|open| open.count() as u64),
        open => Some(open),
    }
}

/// Returns the soft limit on open files from the text of `/proc/self/limits`.
fn descriptor_limit(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Stat {
    fn parse(stat: &str) -> Option<Self> {
        // The second field is the program's name, which may have spaces and brackets in it.
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu: field(14)? + field(15)?,
            started: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_fields_are_counted_after_the_program_name() {
        let stat = "7 (a) b 1 2) S 1 7 7 0 -1 4194560 900 0 0 0 25 5 0 0 20 0 3 0 1234 4096000 500 \
                    18446744073709551615 1";
        let expected =
            Stat { cpu: 30, started: 1234, virtual_bytes: 4_096_000, resident_pages: 500 };
        assert_eq!(Stat::parse(stat), Some(expected));
        assert_eq!(Stat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn soft_descriptor_limit_is_read() {
        let limits = "Limit   Soft Limit  Hard Limit  Units\n\
                      Max open files            1024                 4096                 files\n";
        assert_eq!(descriptor_limit(limits), Some(1024));
        assert_eq!(descriptor_limit(&limits.replace("1024", "unlimited")), None);
    }
}
