//! What the API server says of EndpointSlices (`discovery.k8s.io/v1`), as far as it is needed. Go
//! writes empty lists as `null`.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::few;

/// `EndpointSliceList`. The items are read one by one, as one malformed slice says nothing of the
/// others.
#[derive(Debug, Deserialize)]
pub(super) struct List<'a> {
    pub(super) metadata: Metadata,
    #[serde(borrow, default, deserialize_with = "few::list_or_null")]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

/// One line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct Event<'a> {
    pub(super) r#type: EventType,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventType {
    Added,
    Modified,
    Deleted,
    /// Says only how far the watch is.
    Bookmark,
    /// The object is a [`Status`].
    Error,
    /// What a newer server may say.
    #[serde(other)]
    Unknown,
}

/// `metav1.Status`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Status {
    pub(super) code: u16,
    pub(super) message: String,
}

/// Any object.
#[derive(Debug, Deserialize)]
pub(super) struct Object {
    pub(super) metadata: Metadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    /// How far the server was in its history; nothing to calculate with.
    pub(super) resource_version: String,
}

/// `EndpointSlice`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    /// `IPv4`, `IPv6` or `FQDN`.
    pub(super) address_type: String,
    #[serde(default, deserialize_with = "few::list_or_null")]
    pub(super) endpoints: Option<Vec<Endpoint>>,
    #[serde(default, deserialize_with = "few::list_or_null")]
    pub(super) ports: Option<Vec<EndpointPort>>,
}

/// `Endpoint`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Endpoint {
    /// All reach the same pod, and the first is enough, says Kubernetes.
    #[serde(default, deserialize_with = "few::list_or_null")]
    pub(super) addresses: Option<Vec<String>>,
    #[serde(default)]
    pub(super) conditions: Conditions,
    pub(super) target_ref: Option<TargetRef>,
}

/// `EndpointConditions`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Conditions {
    pub(super) ready: Option<bool>,
    pub(super) serving: Option<bool>,
    pub(super) terminating: Option<bool>,
}

/// Which pod an endpoint is.
#[derive(Debug, Deserialize)]
pub(super) struct TargetRef {
    pub(super) uid: Option<String>,
}

/// `EndpointPort`.
#[derive(Debug, Deserialize)]
pub(super) struct EndpointPort {
    /// Empty for the only port of a service.
    pub(super) name: Option<String>,
    /// None for all ports.
    pub(super) port: Option<u16>,
    /// None for TCP.
    pub(super) protocol: Option<String>,
}

impl Conditions {
    /// Whether an endpoint is one to try. One that is unknown counts as ready, says Kubernetes. One
    /// that is about to end and still serves has requests to finish, so it is named as long as it
    /// is there.
    pub(super) fn is_named(self) -> bool {
        let drains = self.serving == Some(true) && self.terminating == Some(true);
        self.ready != Some(false) || drains
    }
}
