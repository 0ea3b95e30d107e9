//! Following of a service's slices: a list, then the changes since the list.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, timeout_at};

use super::Service;
use super::api::ApiServer;
use super::message::{EndpointSlice, Event, EventType, List, Object, Status};
use super::slices::Slices;
use crate::failure::Failure;
use crate::http::{self, CALL_TIMEOUT};
use crate::publisher::{PublishThrottle, Publisher, Watcher};
use crate::{ClusterAccess, DiscoveryError, NamedAgents};

/// The duration of one watch. If a server sends nothing during a whole watch, that is noticed at
/// most [`CALL_TIMEOUT`] after the watch's end. If a server falls silent after a message, that is
/// noticed in the next watch.
const WATCH_DURATION: Duration = Duration::from_secs(20);
/// The minimum interval between the starts of two watches, in case the server ends them early.
const MIN_WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// The HTTP status for a resource version that the server no longer has.
const GONE: u16 = 410;

/// A watcher of one service's agents.
#[derive(Debug)]
pub(crate) struct KubernetesWatcher {
    service: Service,
    cluster: ClusterAccess,
    watch_duration: Duration,
    call_timeout: Duration,
    slices: Slices,
}

impl KubernetesWatcher {
    pub(crate) fn new(service: Service, cluster: ClusterAccess) -> Result<Self, DiscoveryError> {
        // Reports unusable certificate files now. Each session reads the files again.
        http::build_client_blocking(&cluster.tls())?;
        Ok(Self {
            service,
            cluster,
            watch_duration: WATCH_DURATION,
            call_timeout: CALL_TIMEOUT,
            slices: Slices::default(),
        })
    }

    /// Sets shorter times than in production.
    #[cfg(test)]
    pub(super) fn with_times(self, watch_duration: Duration, call_timeout: Duration) -> Self {
        Self { watch_duration, call_timeout, ..self }
    }

    /// Lists the slices and follows their changes until the server fails.
    async fn run(&mut self, publisher: &mut Publisher<NamedAgents>) -> Result<Infallible, Failure> {
        let server = ApiServer::new(&self.cluster, &self.service, self.call_timeout).await?;
        let mut state = ServiceState {
            service: &self.service,
            slices: &mut self.slices,
            version: String::new(),
        };
        state.apply_list(&server.list().await?)?;
        publisher.publish(state.snapshot());
        let mut throttle = PublishThrottle::default();
        let result =
            follow_watches(&server, self.watch_duration, &mut state, &mut throttle, publisher)
                .await;
        if throttle.is_pending() {
            // The throttle delays these changes, and no later change will publish them.
            publisher.publish(state.snapshot());
        }
        result
    }
}

/// Applies and publishes the changes of successive watches. Only returns on failure. After the
/// regular end of a watch, the next watch continues at the same version without a list.
async fn follow_watches(
    server: &ApiServer<'_>,
    watch_duration: Duration,
    state: &mut ServiceState<'_>,
    throttle: &mut PublishThrottle,
    publisher: &mut Publisher<NamedAgents>,
) -> Result<Infallible, Failure> {
    loop {
        let start = Instant::now();
        let watch = server.watch(&state.version, watch_duration).await;
        let mut watch = watch.map_err(detect_outdated)?;
        let limit = watch_duration + server.call_timeout();
        let mut has_message = false;
        loop {
            let line = async {
                match timeout_at(start + limit, watch.next()).await {
                    Ok(line) => line,
                    // A proxy may keep a watch open beyond its duration.
                    Err(_) if has_message => Ok(None),
                    Err(_) => Err(Failure::Silent(limit)),
                }
            };
            match throttle.next(line).await? {
                Some(Some(line)) => {
                    has_message = true;
                    throttle.note(state.apply_event(&line)?);
                }
                Some(None) => break,
                None => {}
            }
            if throttle.is_due() {
                throttle.published(publisher.publish(state.snapshot()));
                if state.slices.has_room_again() {
                    return Err(Failure::Outdated(
                        "there is room again for agents that were left out".to_owned(),
                    ));
                }
            }
        }
        sleep(MIN_WATCH_INTERVAL.saturating_sub(start.elapsed())).await;
    }
}

impl Watcher for KubernetesWatcher {
    type Snapshot = NamedAgents;

    fn name(&self) -> String {
        self.service.to_string()
    }

    async fn session(&mut self, publisher: &mut Publisher<NamedAgents>) -> Failure {
        let Err(failure) = self.run(publisher).await;
        failure
    }
}

/// Turns status [`GONE`] into [`Failure::Outdated`].
fn detect_outdated(failure: Failure) -> Failure {
    match failure {
        Failure::Refused { status: GONE, message } => Failure::Outdated(message),
        failure => failure,
    }
}

/// The state of a service at one resource version.
#[derive(Debug)]
struct ServiceState<'a> {
    service: &'a Service,
    slices: &'a mut Slices,
    /// The resource version of the last list, event or bookmark.
    version: String,
}

impl ServiceState<'_> {
    fn snapshot(&mut self) -> NamedAgents {
        NamedAgents { addresses: self.slices.addresses(), is_current: true }
    }

    /// Replaces the slices with those of a list.
    fn apply_list(&mut self, body: &Bytes) -> Result<(), Failure> {
        let list: List<'_> = serde_json::from_slice(body)?;
        if list.metadata.resource_version.is_empty() {
            return Err(Failure::Malformed("the list has no version".to_owned()));
        }
        self.slices.clear();
        for item in list.items.unwrap_or_default() {
            self.put(item);
        }
        self.slices.log_skipped(self.service);
        self.version = list.metadata.resource_version;
        Ok(())
    }

    /// Applies a line of a watch. Returns `true` if the named agents may have changed.
    fn apply_event(&mut self, line: &[u8]) -> Result<bool, Failure> {
        let event: Event<'_> = serde_json::from_slice(line)?;
        if event.r#type == EventType::Error {
            let Status { code, message } = serde_json::from_str(event.object.get())?;
            return Err(detect_outdated(Failure::Refused { status: code, message }));
        }
        if event.r#type == EventType::Unknown {
            // The object may have any form.
            return Ok(false);
        }
        let Object { metadata } = serde_json::from_str(event.object.get())?;
        match event.r#type {
            EventType::Added | EventType::Modified => self.put(event.object),
            EventType::Deleted => self.slices.remove(&metadata.name),
            EventType::Bookmark | EventType::Unknown | EventType::Error => {}
        }
        self.slices.log_skipped(self.service);
        if !metadata.resource_version.is_empty() {
            self.version = metadata.resource_version;
        }
        Ok(event.r#type != EventType::Bookmark)
    }

    /// Adds or replaces a slice. A malformed slice is removed.
    fn put(&mut self, object: &RawValue) {
        let metadata = match serde_json::from_str(object.get()) {
            Ok(Object { metadata }) if !metadata.name.is_empty() => metadata,
            _ => return self.slices.skip("?", "the slice has no name"),
        };
        match serde_json::from_str::<EndpointSlice>(object.get()) {
            Ok(slice) => self.slices.put(&metadata.name, slice, self.service.port.as_ref()),
            Err(problem) => {
                self.slices.skip(&metadata.name, problem);
                self.slices.remove(&metadata.name);
            }
        }
    }
}

#[cfg(test)]
mod unit_tests {
    use proptest::prelude::*;

    use super::*;

    const LIST: &str = r#"{"metadata":{"resourceVersion":"7"},"items":[
        {"metadata":{"name":"a"},"addressType":"IPv4",
            "endpoints":[{"addresses":["10.0.0.1"]}],"ports":[{"port":7}]}
    ]}"#;
    const EVENT: &str = r#"{"type":"MODIFIED","object":{
        "metadata":{"name":"a","resourceVersion":"8"},"addressType":"IPv6",
        "endpoints":[{"addresses":["fd00::1"],"conditions":{"ready":true},"targetRef":{"uid":"x"}}],
        "ports":[{"name":"","port":7,"protocol":"TCP"}]
    }}"#;

    /// Replaces `length` bytes of `text`, from `at` on, with `with`.
    fn damaged(text: &str, at: usize, with: &[u8], length: usize) -> Vec<u8> {
        let mut bytes = text.as_bytes().to_vec();
        let at = at % bytes.len();
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, with.iter().copied());
        bytes
    }

    proptest! {
        #[test]
        fn damaged_message_is_applied_or_refused(
            at: usize, with in "[\\PC\\x00-\\x7f]{0,4}", length in 0_usize..9
        ) {
            let service = "kubernetes://ns/svc".parse().unwrap();
            let mut slices = Slices::default();
            let mut state =
                ServiceState { service: &service, slices: &mut slices, version: String::new() };
            state.apply_list(&LIST.into()).unwrap();
            prop_assert!(state.apply_event(EVENT.as_bytes()).unwrap());
            let _ = state.apply_event(&damaged(EVENT, at, with.as_bytes(), length));
            let _ = state.apply_list(&damaged(LIST, at, with.as_bytes(), length).into());
            prop_assert!(state.slices.addresses().len() <= 1);
        }
    }
}
