//! The API server's messages about EndpointSlices (`discovery.k8s.io/v1`), with the needed fields.
//! Go writes empty lists as `null`.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::bounded_list;

/// `EndpointSliceList`. The items are parsed one by one, so that a malformed slice does not affect
/// the others.
#[derive(Debug, Deserialize)]
pub(super) struct List<'a> {
    pub(super) metadata: Metadata,
    #[serde(borrow, default, deserialize_with = "bounded_list::deserialize_or_null")]
    pub(super) items: Option<Vec<&'a RawValue>>,
}

/// One line of a watch.
#[derive(Debug, Deserialize)]
pub(super) struct Event<'a> {
    pub(super) r#type: EventType,
    #[serde(borrow)]
    pub(super) object: &'a RawValue,
}

/// The type of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventType {
    Added,
    Modified,
    Deleted,
    /// The object only has the current resource version.
    Bookmark,
    /// The object is a [`Status`].
    Error,
    /// A type of a newer server.
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

/// The metadata of any object.
#[derive(Debug, Deserialize)]
pub(super) struct Object {
    pub(super) metadata: Metadata,
}

/// `metav1.ObjectMeta` and `metav1.ListMeta`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Metadata {
    pub(super) name: String,
    /// The position in the server's history. It is opaque and can't be compared.
    pub(super) resource_version: String,
}

/// `EndpointSlice`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    /// `IPv4`, `IPv6` or `FQDN`.
    pub(super) address_type: String,
    #[serde(default, deserialize_with = "bounded_list::deserialize_or_null")]
    pub(super) endpoints: Option<Vec<Endpoint>>,
    #[serde(default, deserialize_with = "bounded_list::deserialize_or_null")]
    pub(super) ports: Option<Vec<EndpointPort>>,
}

/// `Endpoint`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Endpoint {
    /// The addresses of the endpoint. According to Kubernetes they are equivalent, so clients may
    /// use only the first one.
    #[serde(default, deserialize_with = "bounded_list::deserialize_or_null")]
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

/// The pod of an endpoint: `ObjectReference`.
#[derive(Debug, Deserialize)]
pub(super) struct TargetRef {
    pub(super) uid: Option<String>,
}

/// `EndpointPort`.
#[derive(Debug, Deserialize)]
pub(super) struct EndpointPort {
    /// The port's name; empty for the only port of a service.
    pub(super) name: Option<String>,
    /// The port's number; `None` for all ports.
    pub(super) port: Option<u16>,
    /// The protocol; `None` for TCP.
    pub(super) protocol: Option<String>,
}

impl Conditions {
    /// Returns `true` if an endpoint with these conditions is named.
    ///
    /// According to Kubernetes, unknown counts as ready. A terminating endpoint that still serves
    /// has requests to finish, so it stays named.
    pub(super) fn is_named(self) -> bool {
        let is_draining = self.serving == Some(true) && self.terminating == Some(true);
        self.ready != Some(false) || is_draining
    }
}
