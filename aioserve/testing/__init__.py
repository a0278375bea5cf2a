"""What plugin authors and aioserve's own tests share."""
