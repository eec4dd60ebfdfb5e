"""What touches cards and the hosts they are in: files of the rshim driver, ssh, the BMC's Redfish."""
