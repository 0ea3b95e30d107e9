//! Errors on the way from a media URL to pixels, and their classification.

use crate::ImageFormat;

/// The reason why a media part could not be used.
///
/// Messages are meant for the client. They contain no URL, credential, response body, file path or
/// resolved address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The URL cannot be parsed, or lacks a host or a path.
    #[error("the media URL is not valid: {reason}")]
    InvalidUrl {
        /// The defect of the URL.
        reason: &'static str,
    },
    /// The client's uuid for an item is empty or too long.
    #[error("the uuid must have 1 to {limit} bytes")]
    InvalidUuid {
        /// The maximum length in bytes.
        limit: usize,
    },
    /// The client's uuid came without a URL, and its content is not cached or no longer cached.
    #[error("no cached media item has this uuid; send the item itself, with or without the uuid")]
    UnknownUuid,
    /// The URL has a scheme other than `data`, `http`, `https` and `file`.
    #[error("the media URL must be a data:, http:, https: or file: URL")]
    UnsupportedScheme,
    /// The URL contains a user name or a password.
    #[error("the media URL must not contain credentials")]
    CredentialsInUrl,
    /// The `data:` URL is not base64, or is truncated.
    #[error("the data URL is not valid: {reason}")]
    InvalidDataUri {
        /// The defect of the URL.
        reason: &'static str,
    },
    /// `file:` URLs are disabled.
    #[error(
        "local files cannot be loaded: the server was started without --allowed-local-media-path"
    )]
    LocalFilesDisabled,
    /// The `file:` URL leads outside the allowed directory, possibly through symbolic links.
    #[error("the file is not below the allowed local media path (--allowed-local-media-path)")]
    LocalPathForbidden,
    /// The file below the allowed directory does not exist, or is not a regular file.
    #[error("the file does not exist or is not a regular file")]
    LocalFileNotFound,
    /// The file below the allowed directory cannot be read.
    #[error("the file cannot be read")]
    LocalFileUnreadable,
    /// The host is, or resolves to, an address outside the public internet.
    #[error("the media host is not allowed: its address is not public (--allow-private-media)")]
    AddressForbidden,
    /// The port is not allowed.
    #[error("the media port is not allowed (--allow-private-media, --allowed-media-ports)")]
    PortForbidden,
    /// The host is not allowed.
    #[error(
        "the media host is not in the server's list of allowed domains (--allowed-media-domains)"
    )]
    HostForbidden,
    /// The rule for allowed hosts is neither a host nor `*.` and a domain.
    #[error(
        "the rule for allowed media domains is not valid: \
         write a host like example.com, or *.example.com"
    )]
    InvalidDomainRule,
    /// The origin answered with a status other than success.
    #[error("the media origin answered with status {status}")]
    OriginStatus {
        /// The HTTP status.
        status: u16,
    },
    /// The origin redirects more often than allowed.
    #[error("the media origin redirects more than {limit} times")]
    TooManyRedirects {
        /// The maximum number of redirects.
        limit: usize,
    },
    /// The origin redirects from `https:` to `http:`, or to a URL that is not `http:` or `https:`,
    /// or that contains credentials.
    #[error("the media origin redirects to a URL that is not allowed")]
    InvalidRedirect,
    /// The origin compressed its answer against the request's `Accept-Encoding`.
    #[error(
        "the media origin sends compressed content, which is not supported; \
         it must send the plain file"
    )]
    OriginEncoding,
    /// The fetch failed: name look-up, connection, TLS, a broken connection, or an answer that
    /// violates HTTP.
    #[error("the media origin cannot be reached, or closed the connection early")]
    OriginFailed,
    /// The origin exceeded a timeout.
    #[error("the media origin took too long")]
    OriginTimeout,
    /// The encoded file is larger than the limit.
    #[error("the media has more than {limit} bytes")]
    TooManyBytes {
        /// The limit in bytes.
        limit: u64,
    },
    /// The header announces more pixels than the limit.
    #[error("the image of {width}x{height} pixels has more than {limit} pixels")]
    TooManyPixels {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for `width` times `height`.
        limit: u64,
    },
    /// The header announces a side longer than the limit.
    #[error("the image of {width}x{height} pixels has a side of more than {limit} pixels")]
    TooLongSide {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for each side in pixels.
        limit: u32,
    },
    /// The header announces a more extreme aspect ratio than the limit.
    #[error(
        "the aspect ratio of the image of {width}x{height} pixels is too large: \
            at most {limit}:1 is supported"
    )]
    AspectRatioTooLarge {
        /// Pixels per row.
        width: u32,
        /// Rows.
        height: u32,
        /// The limit for the longer side divided by the shorter.
        limit: u32,
    },
    /// The JPEG file has more scans than the limit.
    #[error("the image has {scans} scans, more than {limit}; save it as a baseline JPEG")]
    TooManyScans {
        /// The number of scans in the file.
        scans: u32,
        /// The maximum number of scans.
        limit: u32,
    },
    /// The bytes are not in a supported format.
    #[error(
        "the media is not a PNG, JPEG, WebP, GIF or BMP image{}",
        found.map_or(String::new(), |name| format!(" but {name}"))
    )]
    UnsupportedFormat {
        /// The name of the detected format, if known.
        found: Option<&'static str>,
    },
    /// The file is an unsupported variant of a supported format.
    #[error("this kind of {format} image is not supported: {reason}")]
    UnsupportedVariant {
        /// The format.
        format: ImageFormat,
        /// The unsupported feature.
        reason: &'static str,
    },
    /// The image data is broken or truncated.
    #[error("the {format} image is corrupt or truncated: {reason}")]
    Corrupt {
        /// The format.
        format: ImageFormat,
        /// The defect of the image.
        reason: &'static str,
    },
    /// The process's budget for media and request bodies is exhausted.
    #[error("the server's memory for media and request bodies is exhausted; try again later")]
    Busy,
    /// A thread of this process panicked, or TLS could not be set up. Not the client's fault.
    #[error("the media could not be processed; try again")]
    Internal,
}

/// The class of a [`MediaError`], from which a server derives the HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The request is malformed (400).
    BadRequest,
    /// The server's policy refuses the request (403).
    Forbidden,
    /// The media does not exist (404).
    NotFound,
    /// The media exceeds a limit for bytes or pixels (413).
    TooLarge,
    /// The format is not supported (415).
    Unsupported,
    /// The image data is broken (422).
    Corrupt,
    /// The origin failed (502).
    OriginFailed,
    /// The origin was too slow (504).
    OriginTimeout,
    /// The process is out of memory budget for now (503).
    Busy,
    /// This process failed (500).
    Internal,
}

impl MediaError {
    /// Returns the class of the error, from which a server derives the HTTP status.
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
            | Self::AspectRatioTooLarge { .. } => Fault::TooLarge,
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
    fn unsupported_format_error_lists_supported_formats() {
        let named = MediaError::UnsupportedFormat { found: Some("TIFF") }.to_string();
        assert_eq!(named, "the media is not a PNG, JPEG, WebP, GIF or BMP image but TIFF");
        assert!(!MediaError::UnsupportedFormat { found: None }.to_string().contains("but"));
    }

    #[test]
    fn policy_errors_name_the_flag() {
        for (error, flag) in [
            (MediaError::LocalFilesDisabled, "--allowed-local-media-path"),
            (MediaError::LocalPathForbidden, "--allowed-local-media-path"),
            (MediaError::AddressForbidden, "--allow-private-media"),
            (MediaError::PortForbidden, "--allowed-media-ports"),
            (MediaError::HostForbidden, "--allowed-media-domains"),
        ] {
            assert!(error.to_string().contains(flag), "{error}");
        }
    }

    #[test]
    fn missing_local_or_remote_file_is_not_found() {
        assert_eq!(MediaError::OriginStatus { status: 404 }.fault(), Fault::NotFound);
        assert_eq!(MediaError::LocalFileNotFound.fault(), Fault::NotFound);
        assert_eq!(MediaError::OriginStatus { status: 500 }.fault(), Fault::OriginFailed);
    }
}
