//! What can go wrong between a media URL and pixels, and whose fault it is.

use crate::ImageFormat;

/// Why a media part could not be used.
///
/// Messages are meant for the client. They carry no URL, credential, response body, file path or
/// resolved address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// Not a URL at all, or one that lacks a host or a path.
    #[error("the media URL is not valid: {reason}")]
    InvalidUrl {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A client's name for an item that is empty or too long.
    #[error("the uuid must have 1 to {limit} bytes")]
    InvalidUuid {
        /// Most bytes.
        limit: usize,
    },
    /// A client's name without a URL, for something that was not seen before, or not lately.
    #[error(
        "nothing is known under this uuid (any more); send the item itself, with or without the uuid"
    )]
    UnknownUuid,
    /// A scheme other than `data`, `http`, `https` and `file`.
    #[error("the media URL must be a data:, http:, https: or file: URL")]
    UnsupportedScheme,
    /// A user name or password in the URL.
    #[error("the media URL must not contain credentials")]
    CredentialsInUrl,
    /// A `data:` URL that is not base64 or is cut off.
    #[error("the data URL is not valid: {reason}")]
    InvalidDataUri {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// `file:` URLs are switched off.
    #[error(
        "local files cannot be loaded: the server was started without an allowed local media path"
    )]
    LocalFilesDisabled,
    /// A `file:` URL that leads outside the allowed directory, also by way of symbolic links.
    #[error("the file is not below the allowed local media path")]
    LocalPathForbidden,
    /// No such file below the allowed directory, or not a regular file.
    #[error("the file does not exist or is not a regular file")]
    LocalFileNotFound,
    /// A file below the allowed directory that cannot be read.
    #[error("the file cannot be read")]
    LocalFileUnreadable,
    /// The host is, or resolves to, an address outside the public internet.
    #[error("the media host is not allowed: its address is not public")]
    AddressForbidden,
    /// A port that is not allowed.
    #[error("the media port is not allowed")]
    PortForbidden,
    /// A host that is not allowed.
    #[error("the media host is not among those that the server may fetch from")]
    HostForbidden,
    /// A rule for allowed hosts that is neither a host nor `*.` and a domain.
    #[error(
        "the rule for allowed media domains is not valid: write a host like example.com, or *.example.com"
    )]
    InvalidDomainRule,
    /// The origin answered with something other than success.
    #[error("the media origin answered with status {status}")]
    OriginStatus {
        /// The HTTP status.
        status: u16,
    },
    /// The origin redirects more often than allowed.
    #[error("the media origin redirects more than {limit} times")]
    TooManyRedirects {
        /// Most redirects that are followed.
        limit: usize,
    },
    /// The origin redirects to something that is no `http:` or `https:` URL, that holds
    /// credentials, or from `https:` to `http:`.
    #[error("the media origin redirects to a URL that is not allowed")]
    InvalidRedirect,
    /// The origin compressed its answer although it was asked not to.
    #[error(
        "the media origin sends compressed content, which is not supported; it must send the plain file"
    )]
    OriginEncoding,
    /// No name, no connection, no TLS session, a connection that broke, or an answer against the
    /// rules of HTTP.
    #[error("the media origin cannot be reached, or broke off the connection")]
    OriginFailed,
    /// The origin took longer than allowed.
    #[error("the media origin took too long")]
    OriginTimeout,
    /// More encoded bytes than allowed.
    #[error("the media has more than {limit} bytes")]
    TooManyBytes {
        /// The limit.
        limit: u64,
    },
    /// More pixels than allowed, as the header says.
    #[error("the image of {width}x{height} pixels has more than {limit} pixels")]
    TooManyPixels {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for their product.
        limit: u64,
    },
    /// More pixels per row, or more rows, than allowed, as the header says.
    #[error("the image of {width}x{height} pixels has a side of more than {limit}")]
    TooLongSide {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for each of them.
        limit: u32,
    },
    /// More stretched than allowed, as the header says.
    #[error(
        "the image of {width}x{height} pixels is too stretched: its sides may differ by a factor of {limit} at most"
    )]
    TooStretched {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for the longer side divided by the shorter.
        limit: u32,
    },
    /// More scans in a JPEG file than allowed.
    #[error("the image has {scans} scans, more than {limit}; save it as a baseline JPEG")]
    TooManyScans {
        /// How many there are.
        scans: u32,
        /// The limit.
        limit: u32,
    },
    /// Bytes that are no media of a supported format.
    #[error("the media is not a PNG, JPEG, WebP, GIF or BMP image{}", found.map_or(String::new(), |name| format!(" but {name}")))]
    UnsupportedFormat {
        /// What it looks like, where that is known.
        found: Option<&'static str>,
    },
    /// A variant of a supported format that is not supported.
    #[error("this kind of {format} image is not supported: {reason}")]
    UnsupportedVariant {
        /// The format.
        format: ImageFormat,
        /// What is not supported.
        reason: &'static str,
    },
    /// Broken or truncated image data.
    #[error("the {format} image is corrupt or truncated: {reason}")]
    Corrupt {
        /// The format.
        format: ImageFormat,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// This process holds as many bytes of media and request bodies as it may.
    #[error("the server holds as many bytes of media and requests as it may; try again")]
    Busy,
    /// A worker thread of this process died, or TLS could not be set up; not the client's fault.
    #[error("the media could not be processed; try again")]
    Internal,
}

/// Whose fault a [`MediaError`] is, as a server needs it to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request is malformed (400).
    BadRequest,
    /// The request asks for something that the server's policy refuses (403).
    Forbidden,
    /// The media does not exist (404).
    NotFound,
    /// Over a limit for bytes or pixels (413).
    TooLarge,
    /// Not a format that can be read (415).
    Unsupported,
    /// Broken image data (422).
    Corrupt,
    /// The origin failed (502).
    OriginFailed,
    /// The origin was too slow (504).
    OriginTimeout,
    /// There is no room now (503).
    Busy,
    /// This process failed (500).
    Internal,
}

impl MediaError {
    /// Tells whose fault it is, as a server needs it to answer.
    pub fn fault(&self) -> Fault {
        match self {
            Self::InvalidUrl { .. }
            | Self::InvalidUuid { .. }
            | Self::UnknownUuid
            | Self::UnsupportedScheme
            | Self::CredentialsInUrl
            | Self::InvalidDomainRule
            | Self::InvalidDataUri { .. } => Fault::BadRequest,
            Self::LocalFilesDisabled
            | Self::LocalPathForbidden
            | Self::LocalFileUnreadable
            | Self::AddressForbidden
            | Self::PortForbidden
            | Self::HostForbidden => Fault::Forbidden,
            Self::LocalFileNotFound | Self::OriginStatus { status: 404 | 410 } => Fault::NotFound,
            Self::TooManyBytes { .. }
            | Self::TooManyPixels { .. }
            | Self::TooLongSide { .. }
            | Self::TooManyScans { .. }
            | Self::TooStretched { .. } => Fault::TooLarge,
            Self::UnsupportedFormat { .. } | Self::UnsupportedVariant { .. } => Fault::Unsupported,
            Self::Corrupt { .. } => Fault::Corrupt,
            Self::OriginStatus { status: 408 | 504 } | Self::OriginTimeout => Fault::OriginTimeout,
            Self::OriginStatus { .. }
            | Self::TooManyRedirects { .. }
            | Self::InvalidRedirect
            | Self::OriginEncoding
            | Self::OriginFailed => Fault::OriginFailed,
            Self::Busy => Fault::Busy,
            Self::Internal => Fault::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_format_names_the_supported_ones() {
        let named = MediaError::UnsupportedFormat { found: Some("TIFF") }.to_string();
        assert_eq!(named, "the media is not a PNG, JPEG, WebP, GIF or BMP image but TIFF");
        assert!(!MediaError::UnsupportedFormat { found: None }.to_string().contains("but"));
    }

    #[test]
    fn a_missing_file_is_not_found_wherever_it_is_missing() {
        assert_eq!(MediaError::OriginStatus { status: 404 }.fault(), Fault::NotFound);
        assert_eq!(MediaError::LocalFileNotFound.fault(), Fault::NotFound);
        assert_eq!(MediaError::OriginStatus { status: 500 }.fault(), Fault::OriginFailed);
    }
}
