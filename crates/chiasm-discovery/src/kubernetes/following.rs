//! Following the slices of a service: a list, then its changes.

use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::time::{Instant, sleep, timeout_at};

use super::Service;
use super::api::ApiServer;
use super::message::{EndpointSlice, Event, EventType, List, Object, Status};
use super::slices::Slices;
use crate::failure::Failure;
use crate::http::{self, CALL_WITHIN};
use crate::upstream::{Changes, Upstream, View};
use crate::{ClusterAccess, DiscoveryError, Named};

/// How long one watch lasts. A server that is silent is noticed at its end, or at most
/// [`CALL_WITHIN`] later.
const WATCH_FOR: Duration = Duration::from_secs(20);
/// Watches that the server ends sooner are not begun again without a pause.
const SHORTEST_WATCH: Duration = Duration::from_secs(1);
const GONE: u16 = 410;

/// One service as a source of agents.
#[derive(Debug)]
pub(crate) struct KubernetesUpstream {
    service: Service,
    cluster: ClusterAccess,
    watch_for: Duration,
    /// How long a call may take.
    within: Duration,
    slices: Slices,
}

impl KubernetesUpstream {
    pub(crate) fn new(service: Service, cluster: ClusterAccess) -> Result<Self, DiscoveryError> {
        // Files that can't be used are an error now. Later they are read again for each session.
        http::client(&cluster.tls())?;
        Ok(Self {
            service,
            cluster,
            watch_for: WATCH_FOR,
            within: CALL_WITHIN,
            slices: Slices::default(),
        })
    }

    /// With less patience than in production.
    #[cfg(test)]
    pub(super) fn with_patience(self, watch_for: Duration, within: Duration) -> Self {
        Self { watch_for, within, ..self }
    }

    async fn run(&mut self, view: &mut View<Named>) -> Result<(), Failure> {
        let server = ApiServer::new(&self.cluster, &self.service, self.within).await?;
        let mut told =
            Told { service: &self.service, slices: &mut self.slices, version: String::new() };
        told.list(&server.list().await?)?;
        view.set(told.named());
        let mut changes = Changes::default();
        let failed = follow_watches(&server, self.watch_for, &mut told, &mut changes, view).await;
        if changes.are_pending() {
            // They waited to be told together with later ones, and there are none.
            view.set(told.named());
        }
        failed
    }
}

/// Applies what watches of `lasting` each tell. Ends only by failing. A watch that ends in good
/// order is begun again where it was, without a list.
async fn follow_watches(
    server: &ApiServer<'_>,
    lasting: Duration,
    told: &mut Told<'_>,
    changes: &mut Changes,
    view: &mut View<Named>,
) -> Result<(), Failure> {
    loop {
        let begun = Instant::now();
        let mut watch = server.watch(&told.version, lasting).await.map_err(outdated)?;
        let patience = lasting + server.within();
        let mut has_spoken = false;
        loop {
            let line = async {
                match timeout_at(begun + patience, watch.next()).await {
                    Ok(line) => line,
                    // A proxy may let a watch go on for as long as it likes.
                    Err(_) if has_spoken => Ok(None),
                    Err(_) => Err(Failure::Silent(patience)),
                }
            };
            match changes.next(line).await? {
                Some(Some(line)) => {
                    has_spoken = true;
                    changes.note(told.apply(&line)?);
                }
                Some(None) => break,
                None => {}
            }
            if changes.is_due() {
                changes.told(view.set(told.named()));
                if told.slices.has_room_again() {
                    return Err(Failure::Outdated(
                        "there is room again for agents that were left out".to_owned(),
                    ));
                }
            }
        }
        sleep(SHORTEST_WATCH.saturating_sub(begun.elapsed())).await;
    }
}

impl Upstream for KubernetesUpstream {
    type Picture = Named;

    fn name(&self) -> String {
        self.service.to_string()
    }

    async fn session(&mut self, view: &mut View<Named>) -> Failure {
        match self.run(view).await {
            Err(failure) => failure,
            Ok(()) => Failure::Ended,
        }
    }
}

fn outdated(failure: Failure) -> Failure {
    match failure {
        Failure::Refused { status: GONE, message } => Failure::Outdated(message),
        failure => failure,
    }
}

/// The slices as far as the server has told of them.
#[derive(Debug)]
struct Told<'a> {
    service: &'a Service,
    slices: &'a mut Slices,
    version: String,
}

impl Told<'_> {
    fn named(&mut self) -> Named {
        Named { addresses: self.slices.addresses(), is_current: true }
    }

    fn list(&mut self, body: &Bytes) -> Result<(), Failure> {
        let list: List<'_> = serde_json::from_slice(body)?;
        if list.metadata.resource_version.is_empty() {
            return Err(Failure::Malformed("its list has no version".to_owned()));
        }
        self.slices.clear();
        for item in list.items.unwrap_or_default() {
            self.put(item);
        }
        self.slices.log_skipped(self.service);
        self.version = list.metadata.resource_version;
        Ok(())
    }

    /// Applies a line of a watch. Whether other agents may be named now.
    fn apply(&mut self, line: &[u8]) -> Result<bool, Failure> {
        let event: Event<'_> = serde_json::from_slice(line)?;
        if event.r#type == EventType::Error {
            let Status { code, message } = serde_json::from_str(event.object.get())?;
            return Err(outdated(Failure::Refused { status: code, message }));
        }
        if event.r#type == EventType::Unknown {
            // Its object may be of any form.
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

    /// Takes a slice as it is now. A malformed one names nobody.
    fn put(&mut self, object: &RawValue) {
        let metadata = match serde_json::from_str(object.get()) {
            Ok(Object { metadata }) if !metadata.name.is_empty() => metadata,
            _ => return self.slices.skip("?", "it has no name"),
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

    const LIST: &str = r#"{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":"a"},"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.1"]}],"ports":[{"port":7}]}]}"#;
    const EVENT: &str = r#"{"type":"MODIFIED","object":{"metadata":{"name":"a","resourceVersion":"8"},"addressType":"IPv6","endpoints":[{"addresses":["fd00::1"],"conditions":{"ready":true},"targetRef":{"uid":"x"}}],"ports":[{"name":"","port":7,"protocol":"TCP"}]}}"#;

    fn damaged(text: &str, at: usize, with: &[u8], length: usize) -> Vec<u8> {
        let mut bytes = text.as_bytes().to_vec();
        let at = at % bytes.len();
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, with.iter().copied());
        bytes
    }

    proptest! {
        #[test]
        fn whatever_is_said_is_applied_or_refused(at: usize, with in "[\\PC\\x00-\\x7f]{0,4}", length in 0_usize..9) {
            let service = "kubernetes://ns/svc".parse().unwrap();
            let mut slices = Slices::default();
            let mut changes = Told { service: &service, slices: &mut slices, version: String::new() };
            changes.list(&LIST.into()).unwrap();
            prop_assert!(changes.apply(EVENT.as_bytes()).unwrap());
            let _ = changes.apply(&damaged(EVENT, at, with.as_bytes(), length));
            let _ = changes.list(&damaged(LIST, at, with.as_bytes(), length).into());
            prop_assert!(changes.slices.addresses().len() <= 1);
        }
    }
}
